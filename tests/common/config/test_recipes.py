"""Recipes: the documented commands parse as described, and every recipe runs.

A recipe with a mistake gives one clear line. The runs are short, on a few generated images, and
cover each way to start a recipe.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint import load_checkpoint
from common.cli import main
from common.config.parser import build_parser, parse_arguments
from common.config.recipes import RECIPES, print_recipe
from common.config.schema import Config, flag
from common.data import DATASETS
from common.distributed.launch_env import (
    LaunchSpec,
    local_rank_variables,
    processes_to_start,
    resolve_launch,
)
from common.errors import UserError
from common.models import MODELS
from tests.helpers import (
    ROOT,
    Ended,
    Started,
    free_port,
    make_image_folder,
    needs_cifar100,
    only_run_folder,
    run_part,
    start_part,
)

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
SYNCS = {"PartTwo": ("gather_scatter", "all_reduce"), "PartThree": ("ddp",)}
LAUNCHERS_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parse(command: str | list[str], part: str = "PartThree") -> Config:
    """Return the settings of a command line; ignore all words up to ``main.py``."""
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    ends = [index for index, word in enumerate(words) if word.endswith("main.py")]
    return parse_arguments(
        part, "a description", {}, SYNCS[part], words[ends[0] + 1 :] if ends else words
    )


def ranks_environment(rank: int, size: int, port: int = 29500) -> dict[str, str]:
    """Return what torchrun and ``torch.distributed.launch`` set, with all ranks on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


# --- documented commands ---

WIDE_RESNET = (
    "torchrun --nproc_per_node=2 PartThree/main.py --recipe wide-resnet-cifar100 "
    "--batch-size 512 --epochs 5 --base-lr 0.01 --target-accuracy 0.85 --patience 2"
)
RESNET50 = (
    "torchrun --nproc_per_node=2 PartThree/main.py --recipe resnet50-cifar100 -b 128 "
    "--cuda 6,7 --log-wandb"
)
TRANSFER = (
    "python PartThree/main.py --recipe resnet18-transfer-cifar10 --epochs 50 --local-batch-size 32 "
    "--learning_rate 0.001 --accumulation_steps 4 --gpu_ids 0,1 --dist_url tcp://127.0.0.1:23456 "
    "--checkpoint model_checkpoint.pth"
)
EMA = (
    "python PartThree/main.py --recipe resnet-cifar10-ema --distributed --world-size 4 "
    "--epochs 200 --local-batch-size 128 --lr 0.1 --use-amp --use-ema"
)
SHOWN = {
    WIDE_RESNET: {
        "model": "wide_resnet28_10",
        "dataset": "cifar100",
        "batch_size": 512,
        "local_batch_size": None,
        "epochs": 5,
        "learning_rate": 0.01,
        "target_accuracy": 0.85,
        "patience": 2,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "amp": True,
        "validates": True,
    },
    RESNET50: {
        "model": "resnet50",
        "dataset": "cifar100",
        "local_batch_size": 128,
        "batch_size": None,
        "gpu_ids": "6,7",
        "log_wandb": True,
        "epochs": 200,
    },
    TRANSFER: {
        "model": "resnet18_transfer",
        "dataset": "cifar10",
        "epochs": 50,
        "local_batch_size": 32,
        "learning_rate": 0.001,
        "accumulation_steps": 4,
        "gpu_ids": "0,1",
        "unfreeze": False,
        "dist_url": "tcp://127.0.0.1:23456",
        "checkpoint": Path("model_checkpoint.pth"),
        "normalise": "imagenet",
        "input_size": 224,
    },
    EMA: {
        "model": "resnet18",
        "dataset": "cifar10",
        "distributed": True,
        "num_nodes": 4,
        "epochs": 200,
        "local_batch_size": 128,
        "learning_rate": 0.1,
        "amp": True,
        "ema": True,
    },
    "PartThree/main.py --recipe resnet-cifar10-ema": {
        "distributed": False,
        "num_nodes": None,
        "ema": True,
    },
    "PartThree/main.py --recipe wide-resnet-cifar100 --model wide_resnet16_4": {
        "model": "wide_resnet16_4"
    },
    "PartThree/main.py --recipe wide-resnet-cifar100-full": {
        "model": "wide_resnet28_10",
        "epochs": 200,
        "learning_rate": 0.1,
        "batch_size": 128,
        "target_accuracy": None,
    },
    "PartThree/main.py --recipe resnet50-cifar100 --log-tensorboard": {
        "log_tensorboard": True,
        "log_wandb": False,
    },
    "PartThree/main.py --recipe resnet50-cifar100-fast": {
        "model": "resnet50",
        "dataset": "cifar100",
        "epochs": 100,
    },
    "PartThree/main.py --recipe resnet18-transfer-cifar10 --unfreeze": {"unfreeze": True},
    "PartThree/main.py --recipe resnet18-transfer-cifar10 --pretrained-weights w.pth "
    "--resume auto": {
        "pretrained_weights": "w.pth",
        "resume": "auto",
    },
    "PartThree/main.py --recipe vgg11-cifar10-fast": {
        "model": "vgg11",
        "dataset": "cifar10",
        "epochs": 30,
    },
    "PartThree/main.py --recipe vgg11-cifar10-fast --print-config": {"print_config": True},
}


@pytest.mark.parametrize("command", SHOWN)
def test_every_command_shown_gives_what_it_says(command: str) -> None:
    config = parse(command)
    assert {name: getattr(config, name) for name in SHOWN[command]} == SHOWN[command]


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (WIDE_RESNET, ()),
        (RESNET50, ("gpu_ids", "log_wandb")),
        (TRANSFER, ("gpu_ids", "dist_url", "checkpoint")),
        (EMA, ("distributed", "num_nodes")),
    ],
)
def test_the_command_shown_for_a_recipe_gives_its_defaults(
    command: str, own: tuple[str, ...]
) -> None:
    """Except for the flags that belong to one start, such as the GPU numbers."""
    config = parse(command)
    defaults = parse(["--recipe", config.recipe])
    assert (
        dataclasses.replace(config, **{name: getattr(defaults, name) for name in own}) == defaults
    )


def test_shown_batches_are_global_or_a_rank() -> None:
    assert [parse(WIDE_RESNET).global_batch_size(ranks) for ranks in (1, 2, 4)] == [512, 512, 512]
    assert [parse(RESNET50).global_batch_size(ranks) for ranks in (1, 2)] == [128, 256]
    assert [parse(TRANSFER).global_batch_size(ranks) for ranks in (1, 2)] == [128, 256]
    assert parse(EMA).global_batch_size(4) == 512


# --- every way to start a recipe ---


@pytest.mark.parametrize("name", NAMES)
def test_without_launcher_flags_a_recipe_is_one_process(name: str) -> None:
    config = parse(["--recipe", name])
    assert processes_to_start(config.launch_flags, {}) == 0
    assert resolve_launch(config.launch_flags, {}) is None


@pytest.mark.parametrize("command", [WIDE_RESNET, RESNET50, TRANSFER, EMA])
def test_under_a_launcher_each_process_is_a_rank_and_starts_no_other(command: str) -> None:
    """So do the processes of a command that starts several: they start no more."""
    config = parse(command)
    size = config.num_nodes or 2
    for rank in range(size):
        environment = ranks_environment(rank, size, 23456)
        assert processes_to_start(config.launch_flags, environment) == 0
        launch = resolve_launch(config.launch_flags, environment)
        assert (launch.rank, launch.size, launch.master_ip, launch.master_port) == (
            rank,
            size,
            "127.0.0.1",
            23456,
        )


@pytest.mark.parametrize(
    ("command", "processes", "meeting"),
    [
        (TRANSFER, 2, ("127.0.0.1", 23456)),
        (EMA, 4, ("127.0.0.1", None)),
        (EMA + " --dist-url tcp://10.0.0.9:4321", 4, ("10.0.0.9", 4321)),
        (EMA + " --master-port 4321", 4, ("127.0.0.1", 4321)),
    ],
)
def test_a_command_that_starts_its_ranks_hands_on_its_own_arguments(
    command: str, processes: int, meeting: tuple[str, int | None]
) -> None:
    """The ranks get their number, their count and the address as torchrun would give them."""
    config = parse(command)
    assert processes_to_start(config.launch_flags, {}) == processes
    ranks = local_rank_variables(config.launch_flags, processes)
    launches = [resolve_launch(config.launch_flags, rank) for rank in ranks]
    assert [launch.rank for launch in launches] == list(range(processes))
    assert [launch.local_rank for launch in launches] == list(range(processes))
    assert {(launch.size, launch.local_size) for launch in launches} == {(processes, processes)}
    [place] = {(launch.master_ip, launch.master_port) for launch in launches}
    assert place[0] == meeting[0]
    assert 0 < place[1] == (meeting[1] or place[1])
    assert all(launch.opens_store for launch in launches)
    assert processes_to_start(config.launch_flags, ranks[0]) == 0


def test_two_launchers_at_once_meet_on_ports_of_their_own() -> None:
    """No port is fixed: if one is in use, the launcher picks another."""
    import socket

    ports = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for _ in range(20):
            [rank, *_] = local_rank_variables(parse(EMA).launch_flags, 4)
            ports.append(int(rank["MASTER_PORT"]))
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) > 1


def test_distributed_without_a_number_takes_the_gpus_or_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found, processes in ((0, 2), (1, 1), (3, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=found: found)
        for words, expected in (
            ("--distributed", processes),
            ("--distributed --gpu-ids 4,5,6,7", 4),
            ("--gpu-ids 4", 0),
            ("--gpu-ids 4,5,6,7 --world-size 2 --distributed", 2),
        ):
            assert (
                processes_to_start(parse("--recipe resnet-cifar10-ema " + words).launch_flags, {})
                == expected
            )


def test_the_older_launchers_flag_is_taken() -> None:
    """``torch.distributed.launch`` adds --local-rank=1 (formerly --local_rank=1) to processes."""
    for words in (["--local-rank=1"], ["--local_rank=1"], ["--local_rank", "1"]):
        config = parse(["--recipe", "vgg11-cifar10-fast", *words])
        assert config.local_rank == 1
        launch = resolve_launch(config.launch_flags, ranks_environment(1, 2))
        assert (launch.rank, launch.size, launch.local_rank) == (1, 2, 1)


@pytest.mark.parametrize(
    "words",
    [
        "--num-nodes 4 --rank 2 --master-ip 10.0.0.1 --master-port 23456",
        "-N 4 -R 2 --dist-url tcp://10.0.0.1:23456",
        "--world-size 4 --rank 2 --dist_url=tcp://10.0.0.1:23456",
        "--world-size 4 --rank 2 --dist-url tcp://10.0.0.1:23456 --master-ip 10.0.0.1 "
        "--master-port 23456",
    ],
)
def test_a_rank_that_is_told_its_place_takes_it(words: str) -> None:
    config = parse("--recipe resnet18-transfer-cifar10 " + words)
    assert processes_to_start(config.launch_flags, {}) == 0
    assert resolve_launch(config.launch_flags, {}) == LaunchSpec(2, 4, "10.0.0.1", 23456)


@pytest.mark.parametrize(
    ("words", "environment", "named"),
    [
        (
            "--dist-url tcp://10.0.0.1:40 --master-ip 10.0.0.2 --rank 0 --world-size 2",
            {},
            ("10.0.0.1", "--master-ip 10.0.0.2"),
        ),
        (
            "--dist-url tcp://10.0.0.1:4000 --master-port 5000 --rank 0 --world-size 2",
            {},
            ("4000", "--master-port 5000"),
        ),
        ("--distributed --rank 0", {}, ("--distributed", "--rank")),
        (
            "--distributed --rank 0 --world-size 2 --master-ip 10.0.0.1",
            {},
            ("--distributed", "--rank"),
        ),
        ("--local-rank 0", ranks_environment(1, 2), ("--local-rank 0", "LOCAL_RANK=1")),
        (
            "--dist-url tcp://127.0.0.1:4000",
            ranks_environment(1, 2),
            ("--dist-url 4000", "MASTER_PORT=29500"),
        ),
        (
            "--dist-url tcp://10.9.9.9:29500",
            ranks_environment(1, 2),
            ("--dist-url 10.9.9.9", "MASTER_ADDR=127.0.0.1"),
        ),
        ("--distributed --world-size 4", ranks_environment(1, 2), ("4", "WORLD_SIZE=2")),
        ("--dist-url tcp://10.0.0.1:4000", {}, ("--dist-url", "--num-nodes", "--rank")),
        ("--dist-url tcp://10.0.0.1:4000 --rank 0", {}, ("--dist-url", "--num-nodes")),
        ("--rank 0", {}, ("--rank", "--master-ip", "--num-nodes")),
    ],
)
def test_contradictions_about_the_place_are_errors(
    words: str, environment: Mapping[str, str], named: tuple[str, ...]
) -> None:
    config = parse("--recipe resnet-cifar10-ema " + words)
    with pytest.raises(UserError) as error:  # in the order of main()
        assert processes_to_start(config.launch_flags, environment) or resolve_launch(
            config.launch_flags, environment
        )
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:23456",
        "tcp://127.0.0.1",
        "tcp://:23456",
        "tcp://h:99999",
        "tcp://h:0",
        "tcp://h:port",
        "file:///tmp/x",
        "http://h:23456",
        "tcp://h:23456/x",
        "tcp://[h:1",
        "tcp://",
    ],
)
def test_a_dist_url_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(UserError, match="give tcp://ADDRESS:PORT") as error:
        resolve_launch(
            parse(["--dist-url", url, "--rank", "0", "--world-size", "2"]).launch_flags, {}
        )
    assert url in str(error.value)


# --- settings: recipe, flags, and printed recipe ---


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_is_printed_reads_back_the_same(name: str, tmp_path: Path) -> None:
    config = parse(["--recipe", name])
    printed = tmp_path / "printed.toml"
    printed.write_text(print_recipe(config) + "\n", encoding="utf-8")
    again = parse(["--recipe", str(printed)])
    assert dataclasses.replace(again, recipe=name) == config
    assert config.experiment == name
    assert config.validates, "a recipe shows how good it is after each epoch"


def test_print_config_keeps_flags_and_awkward_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--print-config prints a valid recipe: with the flags, and with any text and number."""
    words = [
        "--lr",
        "1e-7",
        "--no-amp",
        "--clip-norm",
        "3",
        "-b",
        "7",
        "--data-dir",
        'a "b" \\ c\té',
        "--mirror",
        "http://x/\n#",
    ]
    assert (
        main(
            "PartThree",
            path="main.py",
            description="",
            sync_choices=("ddp",),
            arguments=["--recipe", "wide-resnet-cifar100", *words, "--print-config"],
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "batch_size is not set" in shown
    (tmp_path / "printed.toml").write_text(shown, encoding="utf-8")
    again = parse(["--recipe", str(tmp_path / "printed.toml")])
    assert dataclasses.replace(again, recipe="wide-resnet-cifar100") == parse(
        ["--recipe", "wide-resnet-cifar100", *words]
    )
    assert (again.learning_rate, again.amp, again.clip_norm, again.local_batch_size) == (
        1e-7,
        False,
        3.0,
        7,
    )


_VALUES = {
    "milestones": ("0.1,0.2", "0.3"),
    "mirror": ("http://a/", "http://b/"),
    "pretrained_weights": ("a.pth", "b.pth"),
    "data_dir": ("a", "b"),
    "output_dir": ("a", "b"),
    "compute": ("measured", "laptop"),
    "cutout": (8, 16),
}
_KEYS = {
    spec.name: spec.metadata
    for spec in dataclasses.fields(Config)
    if spec.metadata and spec.metadata["in_recipe"]
}


def _two_values(name: str) -> tuple[Any, Any]:
    """Return two different values: one for the recipe, one for the flag."""
    rules, default = _KEYS[name], Config.__dataclass_fields__[name].default
    if name in _VALUES:
        return _VALUES[name]
    if rules["type"] is bool:
        return (True, False) if not default else (False, True)
    if rules["choices"]:
        choices = SYNCS["PartTwo"] if name == "sync" else rules["choices"]
        return choices[-1], choices[0]
    if rules["type"] is int:
        return 37, 41
    return 0.25, 0.75


@pytest.mark.parametrize("name", _KEYS)
def test_every_flag_overrides_its_recipes_key(name: str, tmp_path: Path) -> None:
    in_recipe, in_flag = _two_values(name)
    recipe = tmp_path / "one.toml"
    recipe.write_text(
        f"{name} = {json.dumps(in_recipe)}\n"
        + ("epochs = 50\n" if name == "stop_after_epoch" else "")
    )
    kind = _KEYS[name]["type"]
    assert getattr(parse(["--recipe", str(recipe)], "PartTwo"), name) == kind(in_recipe)
    words = (
        [flag(name), str(in_flag)]
        if kind is not bool
        else [flag(name) if in_flag else "--no-" + flag(name)[2:]]
    )
    assert getattr(parse(["--recipe", str(recipe), *words], "PartTwo"), name) == kind(in_flag)
    assert getattr(parse([*words, "--recipe", str(recipe)], "PartTwo"), name) == kind(in_flag), (
        "in any order"
    )


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        ("batch_size = 64", "-b 8", {"batch_size": None, "local_batch_size": 8}),
        ("local_batch_size = 8", "--batch-size 64", {"batch_size": 64, "local_batch_size": None}),
        ("warmup_epochs = 2", "--warmup-steps 3", {"warmup_epochs": None, "warmup_steps": 3}),
        ("warmup_steps = 3", "--warmup-epochs 2", {"warmup_epochs": 2.0, "warmup_steps": None}),
        ("max_steps = 7", "--epochs 2", {"max_steps": None, "epochs": 2}),
        ("epochs = 2", "--max-steps 7", {"max_steps": 7}),
        ("amp = true", "--no-amp", {"amp": False}),
        ("amp = true", "--no-use-amp", {"amp": False}),
        ("ema = true", "--no-ema", {"ema": False}),
        ("ema = true", "--no-use-ema", {"ema": False}),
        ("learning_rate = 1", "", {"learning_rate": 1.0}),
        ("batch-size = 64", "", {"batch_size": 64}),
    ],
)
def test_what_a_flag_says_puts_aside_the_recipes_other_word_for_it(
    recipe: str, words: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(recipe)
    config = parse(["--recipe", str(tmp_path / "mine.toml"), *words.split()])
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.experiment == "mine"


def test_a_flag_overrides_but_the_rest_of_the_recipe_stays() -> None:
    config = parse("--recipe resnet18-transfer-cifar10 --input-size 64")
    assert config == dataclasses.replace(parse("--recipe resnet18-transfer-cifar10"), input_size=64)


# --- mistakes in a recipe ---

WRONG = {
    "epochz = 5": ("epochz", "did you mean epochs?"),
    "lr = 0.1": ("unknown key 'lr'",),
    "zzzz = 5": ("zzzz", "--print-config"),
    "rank = 1": ("unknown key 'rank'",),
    'resume = "auto"': ("resume",),
    'recipe = "vgg11-cifar10-fast"': ("recipe",),
    'part = "PartOne"': ("part",),
    "[training]\nepochs = 5": ("training",),
    "amp = 1": ("amp", "true or false"),
    'amp = "true"': ("amp", "true or false"),
    'epochs = "5"': ("epochs", "'5'", "a whole number"),
    "epochs = 5.0": ("epochs", "5.0", "a whole number"),
    "epochs = true": ("epochs", "True", "a whole number"),
    'learning_rate = "0.1"': ("learning_rate", "a number"),
    "learning_rate = true": ("learning_rate", "a number"),
    "model = 11": ("model", "11", "a text"),
    'model = ["vgg11"]': ("model", "a text"),
    "data_dir = 3": ("data_dir", "a text"),
    "milestones = [0.5]": ("milestones", "a text"),
    "epochs = 0": ("epochs", "0", "at least 1"),
    "epochs = 99999999999": ("epochs", "99999999999", "at most"),
    "learning_rate = -1": ("learning-rate", "-1", "above 0"),
    "learning_rate = nan": ("learning-rate", "nan"),
    "learning_rate = inf": ("learning-rate", "inf"),
    "learning_rate = " + "9" * 400: ("learning",),
    "epochs = " + "9" * 5000: (),
    "target_accuracy = 85": ("target-accuracy", "85", "at most 1"),
    'model = "vgg12"': ("model", "vgg12", "vgg11"),
    'milestones = "30,60"': ("milestones", "30,60"),
    "batch_size = 4\nlocal_batch_size = 4": ("batch-size", "local-batch-size"),
    "warmup_steps = 4\nwarmup_epochs = 4": ("warmup-steps", "warmup-epochs"),
    'sync = "none"': ("sync", "ddp"),
    "epochs 5": ("cannot be read",),
    "epochs = 5\nepochs = 6": ("cannot be read",),
    "epochs = ": ("cannot be read",),
    "a = " + "[" * 5000: (),
}


def refused(capsys: pytest.CaptureFixture[str], *words: object, part: str = "PartThree") -> str:
    """Return the one line with which ``main`` refuses a command line; check status and stdout."""
    status = main(
        part,
        path=f"{part}/main.py",
        description="",
        sync_choices=SYNCS[part],
        arguments=list(map(str, words)),
    )
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("content", [pytest.param(content, id=content[:30]) for content in WRONG])
def test_a_wrong_recipe_is_one_line_with_file_key_and_value(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(content + "\n")
    error = refused(capsys, "--recipe", recipe)
    for words in (str(recipe), *WRONG[content]):
        assert words in error, error
    assert len(error) < 1000


def test_a_recipe_that_is_no_text_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00epochs")
    assert str(tmp_path / "binary.toml") in refused(capsys, "--recipe", tmp_path / "binary.toml")


@pytest.mark.parametrize(
    "name", ["wide-resnet", "", "wide-resnet-cifar100.tom", "/nowhere/mine.toml", ".toml"]
)
def test_a_recipe_that_is_not_there_lists_those_that_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--recipe", name)
    assert name in error
    assert all(known in error for known in NAMES)


def test_a_wrong_flag_is_not_blamed_on_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--recipe", "vgg11-cifar10-fast", "--epochs", 0)
    assert error.startswith("error: --epochs: got 0")
    error = refused(capsys, "--recipe", "wide-resnet-cifar100", "--batch-size", 4, "-b", 4)
    assert "--batch-size" in error
    assert "recipe" not in error


def test_gpus_that_are_not_there_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = refused(
        capsys, "--recipe", "resnet50-cifar100", "-b", 128, "--cuda", "6,7", "--log-wandb"
    )
    assert "--gpu-ids: got 6,7" in error


# --- every recipe runs, in every way to start it ---


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 24 training and 8 test images in two classes."""
    return make_image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file in torchvision's format with weights and statistics unlike any fresh ones."""
    from torchvision.models import resnet18

    torch.manual_seed(3)
    state = resnet18().state_dict()
    for name, value in state.items():
        if name.endswith(("running_mean", "running_var")):
            value.mul_(0.5).add_(torch.rand(value.shape) * 0.1)
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(state, path)
    return path


def quick(recipe: str, images: Path, output: Path, *more: object) -> list[object]:
    """Return flags for two steps of a recipe on a few images.

    An error that the first step causes shows in the second.
    """
    return [
        "--recipe",
        recipe,
        "--dataset",
        "folder",
        "--data-dir",
        images,
        "--max-steps",
        2,
        "--log-every",
        1,
        "--no-amp",
        "--output-dir",
        output,
        *more,
    ]


def start(module: list[str], part: str, *words: object, cwd: Path) -> Started:
    """Start a part with one of torch's launchers, ``module``, in a clean environment."""
    clean = {
        name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES
    } | {"OMP_NUM_THREADS": "1"}
    return Started(
        [sys.executable, *module, str(ROOT / part / "main.py"), *map(str, words)],
        cwd=cwd,
        env=clean,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(
    ended: Ended,
    output: Path,
    recipe: str,
    *,
    ranks: int,
    model: str,
    ema: bool = False,
    seconds_of_training: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Check what each run of a recipe writes; return its folder and the summary.

    Status 0, results of each epoch over all ranks, the best weights, and one folder
    <recipe>/<time>.
    """
    assert ended.status == 0, ended.out + ended.err
    assert "Traceback" not in ended.err
    folder = only_run_folder(output, recipe)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", folder.name)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["recipe"], summary["nodes"], summary["model"]) == (recipe, ranks, model)
    assert summary["ranks_hold_equal_weights"] is True
    assert summary["train_loss_last_step"] > 0
    epochs = lines(folder / "epochs.jsonl")
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, len(epochs) + 1))
    last = epochs[-1]
    assert last["samples_per_second"] > 0
    assert summary["total_seconds"] >= sum(epoch["seconds"] for epoch in epochs)
    # Each image counts once on any number of ranks, as in the final report, which gathers all #
    # predictions.
    assert last["val_accuracy"] == pytest.approx(summary["test_accuracy"])
    assert last["val_loss"] == pytest.approx(summary["test_loss"], rel=1e-3)
    assert len(
        re.findall(r"^Epoch \d+: train loss .*validation loss .*samples/s", ended.out, re.MULTILINE)
    ) == len(epochs)
    assert re.search(
        r"^training time +[\d.]+ s, with validation, [\d,]+ samples/s without$",
        ended.out,
        re.MULTILINE,
    )
    best = load_checkpoint(folder / "checkpoints" / "best.pt")
    if ema:
        assert last["ema_val_accuracy"] == pytest.approx(summary["ema_test_accuracy"])
        assert re.search(r"^EMA accuracy +[\d.]+ %", ended.out, re.MULTILINE)
        assert (folder / "report_ema.txt").exists()
        assert "ema_state_dict" in best
    else:
        assert summary["ema_test_accuracy"] is None
        assert last["ema_val_accuracy"] is None
    return folder, summary


@pytest.mark.slow
def test_wide_resnet_as_one_process_profiled(tmp_path: Path, images: Path) -> None:
    """Model 16-4 by flag, mixed precision, and a trace of the steps after the second.

    A notice says that a CPU run is repeatable without --deterministic.
    """
    [ended] = run_part(
        "PartThree",
        *quick("wide-resnet-cifar100", images, tmp_path),
        "--model",
        "wide_resnet16_4",
        "--amp",
        "--batch-size",
        4,
        "--max-steps",
        4,
        "--profile",
        "--deterministic",
        cwd=tmp_path,
    )
    folder, summary = check(
        ended, tmp_path, "wide-resnet-cifar100", ranks=1, model="wide_resnet16_4"
    )
    assert "rate 0.01" in ended.out
    assert "notice: --deterministic changes nothing on a CPU: a run re" in ended.out
    assert "Target accuracy reached" not in ended.out
    assert (summary["steps"], summary["global_batch_size"]) == (4, 4)
    trace = json.loads((folder / "profile_rank0.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any(name.startswith("aten::conv") for name in names)
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
    assert "ProfilerStep#1" not in names, "the first steps warm up"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["wide-resnet-cifar100", "wide-resnet-cifar100-full"])
def test_wide_resnet_28_10_runs_as_its_recipes_have_it(
    tmp_path: Path, images: Path, recipe: str
) -> None:
    [ended] = run_part(
        "PartThree",
        *quick(recipe, images, tmp_path),
        "--batch-size",
        4,
        cwd=tmp_path,
        timeout_seconds=280,
    )
    check(ended, tmp_path, recipe, ranks=1, model="wide_resnet28_10")


@pytest.mark.slow
def test_wide_resnet_full_with_ranks_that_are_told_their_places(
    tmp_path: Path, images: Path
) -> None:
    """--num-nodes, --rank, --master-ip; the rate scales with the global batch, not the ranks."""
    ended = run_part(
        "PartThree",
        *quick("wide-resnet-cifar100-full", images, tmp_path),
        "--model",
        "wide_resnet16_4",
        "--batch-size",
        8,
        "--scale-lr",
        "--reference-batch-size",
        16,
        "--schedule",
        "constant",
        "--lr",
        0.01,
        ranks=2,
        cwd=tmp_path,
    )
    assert [one.status for one in ended] == [0, 0], ended
    assert ended[1].out.startswith("rank 1 of 2: finished after 2 steps in ")
    folder, summary = check(
        ended[0], tmp_path, "wide-resnet-cifar100-full", ranks=2, model="wide_resnet16_4"
    )
    assert summary["global_batch_size"] == 8
    assert [step["learning_rate"] for step in lines(folder / "metrics.jsonl")] == pytest.approx(
        [0.005, 0.005]
    )
    assert "rate 0.005" in ended[0].out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["resnet50-cifar100", "resnet50-cifar100-fast"])
def test_resnet50_under_torchrun(tmp_path: Path, images: Path, recipe: str) -> None:
    """``-b`` is per rank and overrides the global batch size of the fast recipe."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    ended = start(
        launcher, "PartThree", *quick(recipe, images, tmp_path), "-b", 2, cwd=tmp_path
    ).end(timeout_seconds=250)
    _, summary = check(
        ended, tmp_path, recipe, ranks=2, model="resnet50", ema=recipe.endswith("fast")
    )
    assert summary["global_batch_size"] == 4
    assert "batch: 2 per rank x 2 ranks = 4 global" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("unfreeze", [False, True])
def test_transfer_learning_with_a_dist_url(
    tmp_path: Path, images: Path, weights: Path, unfreeze: bool
) -> None:
    """Two ranks start with --dist-url and --rank; only rank 0 has the weights file.

    Without --unfreeze, only the last layer trains; the others keep the file's weights and
    statistics. The global batch is 4 per rank x 2 micro-batches x 2 ranks = 16.
    """
    words = [
        *quick("resnet18-transfer-cifar10", images, tmp_path),
        "--input-size",
        32,
        "--accumulation_steps",
        2,
        "-b",
        4,
        "--dist_url",
        f"tcp://127.0.0.1:{free_port()}",
        "--world-size",
        2,
        "--threads",
        1,
        "--checkpoint",
        "latest.pth",
        *(["--unfreeze"] if unfreeze else []),
    ]
    ranks = [
        start_part(
            "PartThree",
            *words,
            "--rank",
            rank,
            "--pretrained-weights",
            weights if rank == 0 else "not-here",
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    ended = [rank.end() for rank in ranks]
    assert [one.status for one in ended] == [0, 0], ended
    folder, summary = check(
        ended[0], tmp_path, "resnet18-transfer-cifar10", ranks=2, model="resnet18_transfer"
    )
    assert f"pretrained weights from {weights}" in ended[0].out
    assert summary["global_batch_size"] == 16
    assert (
        "4 per rank x 2 micro-batches x 2 ranks = 16 global; 2 steps, 2 per epoch" in ended[0].out
    ), "24 images: 16 and 8"
    assert sum(step["local_samples"] for step in lines(folder / "metrics.jsonl")) == 12, (
        "half of the 24 are rank 0's"
    )

    source = torch.load(weights, weights_only=True)
    latest = load_checkpoint(tmp_path / "latest.pth")
    assert latest["step"] == 2
    own = {
        name.removeprefix("network."): value for name, value in latest["model_state_dict"].items()
    }
    same = {
        name for name in own if not name.startswith("fc.") and torch.equal(own[name], source[name])
    }
    others = {name for name in own if not name.startswith("fc.")} - same
    if unfreeze:
        assert {"conv1.weight", "bn1.running_mean", "layer4.1.conv2.weight"} <= others
    else:
        assert not others
    assert len(latest["optimizer_state_dict"]["state"]) == (62 if unfreeze else 2)


@pytest.mark.slow
def test_resnet_with_averaged_weights_starts_its_ranks_by_itself(
    tmp_path: Path, images: Path
) -> None:
    """One command starts both ranks; validation accuracies, EMA too, cover both ranks."""
    [ended] = run_part(
        "PartThree",
        *quick("resnet-cifar10-ema", images, tmp_path),
        "--distributed",
        "--world-size",
        2,
        "--epochs",
        200,
        "--local-batch-size",
        2,
        "--lr",
        0.01,
        "--use-ema",
        cwd=tmp_path,
    )
    _, summary = check(ended, tmp_path, "resnet-cifar10-ema", ranks=2, model="resnet18", ema=True)
    assert summary["global_batch_size"] == 4
    assert summary["backend"] == "gloo"


@pytest.mark.slow
def test_a_target_that_is_reached_ends_all_ranks(tmp_path: Path, images: Path) -> None:
    """With ``torch.distributed.launch``; any accuracy reaches the target.

    Patience 2 therefore ends training after 2 of 5 epochs.
    """
    launcher = [
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    words = quick("vgg11-cifar10-fast", images, tmp_path)
    del words[words.index("--max-steps") : words.index("--max-steps") + 2]
    ended = start(
        launcher,
        "PartThree",
        *words,
        "--epochs",
        5,
        "--batch-size",
        8,
        "--target-accuracy",
        0.001,
        "--patience",
        2,
        "--warmup-epochs",
        1,
        cwd=tmp_path,
    ).end(timeout_seconds=120)
    folder, summary = check(ended, tmp_path, "vgg11-cifar10-fast", ranks=2, model="vgg11", ema=True)
    assert ended.out.count("Target accuracy reached: 0.001 in 2 epochs in a row") == 1
    assert "Target accuracy" not in ended.err
    assert [epoch["epoch"] for epoch in lines(folder / "epochs.jsonl")] == [1, 2]
    assert summary["last_step"] == 6
    assert "15 steps, 3 per epoch" in ended.out, "the schedule was made for all five"
    assert [
        len(lines_of.read_text().splitlines()) for lines_of in sorted(folder.glob("logs_rank*.txt"))
    ] == [2, 2]


def test_without_pretrained_weights_nothing_is_trained(tmp_path: Path, images: Path) -> None:
    """No network, no file: one line and status 1 on both ranks, and no random weights.

    Only one rank has tried to get the file.
    """
    nowhere = f"http://127.0.0.1:{free_port()}"
    env = {
        "TORCH_HOME": str(tmp_path / "torch"),
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "no_proxy": "",
    }
    ended = run_part(
        "PartThree",
        *quick("resnet18-transfer-cifar10", images, tmp_path / "out"),
        "--input-size",
        32,
        "-b",
        4,
        ranks=2,
        cwd=tmp_path,
        env=env,
    )
    assert [one.status for one in ended] == [1, 1], ended
    for rank, one in enumerate(ended):
        assert "Traceback" not in one.err
        assert f"error (rank {rank}): " in one.err
    assert (
        "the pretrained weights could not be loaded from "
        "https://download.pytorch.org/models/resnet18-f37072fd.pth" in (ended[0].err)
    )
    assert "and give --pretrained-weights FILE" in ended[0].err
    folder = only_run_folder(tmp_path / "out", "resnet18-transfer-cifar10")
    assert not (folder / "metrics.jsonl").exists()
    assert not list(folder.rglob("*.pt"))


@pytest.mark.slow
def test_checkpoint_holds_the_latest_state_and_resume_auto_goes_on_from_it(
    tmp_path: Path, images: Path, weights: Path
) -> None:
    """Resume works without the first run's folder and without the pretrained file.

    The result equals an uninterrupted run bit for bit.
    """
    words = quick("resnet18-transfer-cifar10", images, tmp_path / "parts")
    words[words.index("--max-steps") : words.index("--max-steps") + 2] = ["--epochs", 2]
    words += ["--input-size", 32, "-b", 4, "--accumulation-steps", 2, "--threads", 1]
    straight_words = [
        *words,
        "--output-dir",
        tmp_path / "straight",
        "--pretrained-weights",
        weights,
    ]
    both = [
        start_part("PartThree", *straight_words, "--warmup-epochs", 1, cwd=tmp_path),
        start_part(
            "PartThree",
            *words,
            "--warmup-epochs",
            1,
            "--pretrained-weights",
            weights,
            "--stop-after-epoch",
            1,
            "--checkpoint",
            "model_checkpoint.pth",
            cwd=tmp_path,
        ),
    ]
    straight, first = (one.end() for one in both)
    assert (straight.status, first.status) == (0, 0), straight.err + first.err
    shutil.rmtree(tmp_path / "parts")
    assert load_checkpoint(tmp_path / "model_checkpoint.pth")["epoch"] == 1

    [second] = run_part(
        "PartThree",
        *words,
        "--warmup-epochs",
        1,
        "--checkpoint",
        "model_checkpoint.pth",
        "--resume",
        "auto",
        cwd=tmp_path,
    )
    assert second.status == 0, second.err
    assert "resuming from model_checkpoint.pth, step 3" in second.out
    assert "pretrained weights from" not in second.out
    undisturbed = only_run_folder(tmp_path / "straight", "resnet18-transfer-cifar10")
    whole = load_checkpoint(undisturbed / "checkpoints" / "Epoch_2.pt")
    after = only_run_folder(tmp_path / "parts", "resnet18-transfer-cifar10")
    for other in (
        load_checkpoint(after / "checkpoints" / "Epoch_2.pt"),
        load_checkpoint(tmp_path / "model_checkpoint.pth"),
    ):
        assert (other["epoch"], other["step"]) == (whole["epoch"], whole["step"]) == (2, 6)
        assert other["model_state_dict"].keys() == whole["model_state_dict"].keys()
        for name, tensor in whole["model_state_dict"].items():
            assert torch.equal(tensor, other["model_state_dict"][name]), name
    assert [step["step"] for step in lines(after / "metrics.jsonl")] == [4, 5, 6]


@pytest.mark.cifar
@needs_cifar100
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        pytest.param("tiny", "13,140", marks=pytest.mark.slow),
        pytest.param("wide_resnet16_4", "2,772,020", marks=pytest.mark.long),
    ],
)
def test_a_recipe_on_the_real_cifar100(tmp_path: Path, model: str, parameters: str) -> None:
    """CIFAR-100 has 100 classes and 10,000 test images, and each image counts once."""
    [ended] = run_part(
        "PartThree",
        "--recipe",
        "wide-resnet-cifar100-full",
        "--model",
        model,
        "--no-validate",
        "--no-amp",
        "--max-steps",
        2,
        "--batch-size",
        16,
        "--output-dir",
        tmp_path,
        cwd=tmp_path,
        timeout_seconds=800,
    )
    assert ended.status == 0, ended.err
    folder = only_run_folder(tmp_path, "wide-resnet-cifar100-full")
    report = json.loads((folder / "report.json").read_text())
    assert report["samples"] == 10_000
    assert len(report["class_names"]) == 100
    assert f"{model} ({parameters} parameters) on cifar100 (50,000 training images)" in ended.out
    assert not (folder / "checkpoints" / "best.pt").exists()


def test_every_recipe_names_what_there_is() -> None:
    """The recipe files, the parser and SHOWN name the same recipes, models and data sets."""
    known = build_parser("PartThree", "", {}, ("ddp",)).format_help()
    assert "--recipe" in known
    assert {command.split("--recipe ")[1].split()[0] for command in SHOWN} == set(NAMES)
    for name in NAMES:
        config = parse(["--recipe", name])
        assert config.model in MODELS
        assert config.dataset in DATASETS
