"""Recipes: their commands, mistakes and settings; each trains two steps, started in each way."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.checkpoint import load_checkpoint
from common.cli import main
from common.config.parser import parse_arguments
from common.config.recipes import RECIPES, print_recipe
from common.config.schema import flag, settings
from common.data import DATASETS
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.models import MODELS
from common.reporting.header import run_warnings
from common.sync import strategy_options
from common.utils.environment import _TORCHRUN_RULES
from common.utils.limits import kind_and_meta
from tests.helpers import (
    ROOT,
    TINY,
    Started,
    free_port,
    make_image_folder,
    needs_cifar100,
    only_run_folder,
    run_part,
    start_part,
)
from tests.helpers.records import json_lines, json_of

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
SYNCS = {"PartTwo": ("gather_scatter", "all_reduce"), "PartThree": ("ddp",)}
LAUNCHERS_VARIABLES = tuple(_TORCHRUN_RULES)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parse(command, part="PartThree"):
    """Return the settings of a command line; ignore all words up to ``main.py``."""
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    ends = [index for index, word in enumerate(words) if word.endswith("main.py")]
    return parse_arguments(part, "", SYNCS[part], words[ends[0] + 1 :] if ends else words)


# --- documented commands ---

SHOWN = {  # command: what it sets in addition to its recipe, in the names of Config
    "torchrun --nproc_per_node=2 PartThree/main.py --recipe wide-resnet-cifar100 --batch-size 512 "
    "--epochs 5 --base-lr 0.01 --target-accuracy 0.85 --patience 2": {},
    "torchrun --nproc_per_node=2 PartThree/main.py --recipe resnet50-cifar100 -b 128 --cuda 6,7 "
    "--log-wandb": {"gpu_ids": "6,7", "log_wandb": True},
    "python PartThree/main.py --recipe resnet18-transfer-cifar10 --epochs 50 --local-batch-size 32 "
    "--learning_rate 0.001 --accumulation_steps 4 --gpu_ids 0,1 --dist_url tcp://127.0.0.1:23456 "
    "--checkpoint model_checkpoint.pth": {
        "gpu_ids": "0,1",
        "dist_url": "tcp://127.0.0.1:23456",
        "checkpoint": Path("model_checkpoint.pth"),
    },
    "python PartThree/main.py --recipe resnet-cifar10-ema --distributed --world-size 4 "
    "--epochs 200 --local-batch-size 128 --lr 0.1 --use-amp --use-ema": {
        "distributed": True,
        "world_size": 4,
    },
}


@pytest.mark.parametrize("command", SHOWN)
def test_the_command_shown_for_a_recipe_gives_its_defaults(command):
    config = parse(command)
    defaults = parse(["--recipe", config.recipe])
    assert config == dataclasses.replace(defaults, **SHOWN[command])


# --- settings: recipe, flags, and printed recipe ---


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_is_printed_reads_back_the_same(name, tmp_path):
    config = parse(["--recipe", name])
    assert (config.model in MODELS, config.dataset in DATASETS) == (True, True)
    printed = tmp_path / "printed.toml"
    printed.write_text(print_recipe(config) + "\n", encoding="utf-8")
    again = parse(["--recipe", str(printed)])
    assert dataclasses.replace(again, recipe=name) == config
    assert config.experiment_name == name
    assert config.validates or name == "cs744", "a recipe shows how good it is after each epoch"


def test_print_config_keeps_flags_and_awkward_texts(tmp_path, capsys):
    """--print-config prints a valid recipe: with the flags, and with any text and number."""
    words = "--recipe wide-resnet-cifar100 --lr 1e-7 --no-amp --clip-norm 3 -b 7".split()
    words += ["--data-dir", 'a "b" \\ c é', "--mirror", "http://x/ #"]
    how = {"path": "", "description": "", "sync_choices": ("ddp",)}
    assert main("PartThree", arguments=[*words, "--print-config"], **how) == 0
    shown = capsys.readouterr().out
    assert "batch_size is not set" in shown
    (tmp_path / "printed.toml").write_text(shown, encoding="utf-8")
    again = parse(["--recipe", str(tmp_path / "printed.toml")])
    assert dataclasses.replace(again, recipe="wide-resnet-cifar100") == parse(words)
    assert (again.learning_rate, again.clip_norm, again.data_dir) == (1e-7, 3.0, Path(words[-3]))


_VALUES = {
    "milestones": ("0.1,0.2", "0.3"),
    "mirror": ("http://a/", "http://b/"),
    "pretrained_weights": ("a.pth", "b.pth"),
    "data_dir": ("a", "b"),
    "output_dir": ("a", "b"),
    "compute": ("measured", "laptop"),
    "cutout": (8, 16),
}
_KEYS = {name: known for name, known in settings().items() if known.in_recipe}


def _two_values(name):
    """Return two different values: one for the recipe, one for the flag."""
    known = _KEYS[name]
    if name in _VALUES:
        return _VALUES[name]
    if known.kind is bool:
        return (True, False) if not known.default else (False, True)
    if known.choices:
        choices = SYNCS["PartTwo"] if name == "sync" else known.choices
        return choices[-1], choices[0]
    if name in strategy_options() and known.kind is int:
        _, meta = kind_and_meta(known.annotation)
        return meta.ge, meta.ge + 1
    if known.kind is int:
        return 37, 41
    return 0.25, 0.75


@pytest.mark.parametrize("name", _KEYS)
def test_every_flag_overrides_its_recipes_key(name, tmp_path):
    in_recipe, in_flag = _two_values(name)
    recipe = tmp_path / "one.toml"
    recipe.write_text(
        f"{name} = {json.dumps(in_recipe)}\n"
        + ("epochs = 50\n" if name == "stop_after_epoch" else "")
    )
    kind = _KEYS[name].kind
    assert getattr(parse(["--recipe", str(recipe)], "PartTwo"), name) == kind(in_recipe)
    words = [flag(name), str(in_flag)]
    if kind is bool:
        words = [flag(name) if in_flag else "--no-" + flag(name)[2:]]
    for command in (["--recipe", str(recipe), *words], [*words, "--recipe", str(recipe)]):
        assert getattr(parse(command, "PartTwo"), name) == kind(in_flag)


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        ("batch_size = 64", "-b 8", {"batch_size": None, "local_batch_size": 8}),
        ("local_batch_size = 8", "--batch-size 64", {"batch_size": 64, "local_batch_size": None}),
        ("warmup_epochs = 2", "--warmup-steps 3", {"warmup_epochs": None, "warmup_steps": 3}),
        ("warmup_steps = 3", "--warmup-epochs 2", {"warmup_epochs": 2.0, "warmup_steps": None}),
        ("max_steps = 7", "--epochs 2", {"max_steps": None, "epochs": 2}),
        ("epochs = 2", "--max-steps 7", {"max_steps": 7}),
        ("learning_rate = 1", "", {"learning_rate": 1.0}),
        ("batch-size = 64", "", {"batch_size": 64}),
    ],
)
def test_what_a_flag_says_puts_aside_the_recipes_other_word_for_it(
    recipe, words, expected, tmp_path
):
    (tmp_path / "mine.toml").write_text(recipe)
    config = parse(["--recipe", str(tmp_path / "mine.toml"), *words.split()])
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.experiment_name == "mine"


def test_a_flag_overrides_but_the_rest_of_the_recipe_stays():
    config = parse("--recipe resnet18-transfer-cifar10 --input-size 64")
    assert config == dataclasses.replace(parse("--recipe resnet18-transfer-cifar10"), input_size=64)
    measured = parse(["--recipe", "wide-resnet-cifar100", "--measure-only"])
    assert (measured.validates, measured.patience) == (False, 2)


# --- mistakes in a recipe ---

WRONG = {
    "epochz = 5": ("epochz", "did you mean epochs?"),
    "zzzz = 5": ("zzzz", "--print-config"),
    "rank = 1": ("unknown key 'rank'",),
    'recipe = "vgg11-cifar10-fast"': ("recipe",),
    "[training]\nepochs = 5": ("training",),
    "amp = 1": ("amp", "true or false"),
    'epochs = "5"': ("epochs", "'5'", "a whole number"),
    "epochs = 5.0": ("epochs", "5.0", "a whole number"),
    "epochs = true": ("epochs", "True", "a whole number"),
    'learning_rate = "0.1"': ("learning_rate", "a number"),
    'model = ["vgg11"]': ("model", "['vgg11']", "vgg11"),
    "data_dir = 3": ("data_dir", "3", "a text"),
    "milestones = [0.5]": ("milestones", "[0.5]", "0.3,0.6,0.8"),
    "epochs = 0": ("epochs", "0", "at least 1"),
    "learning_rate = nan": ("learning_rate", "nan", "above 0"),
    "learning_rate = " + "9" * 400: ("learning_rate", "999"),
    "epochs = " + "9" * 6000: ("6000 digits",),
    "learning_rate = [0x" + "f" * 6000 + "]": ("learning_rate", "thousands of digits"),
    f'data_dir = "{"a" * 10_000}"': ("data_dir", "'aaaa", "1 to 4,095 characters"),
    'pretrained_weights = "\\u001b[2J"': ("pretrained_weights", r"'\x1b[2J'"),
    '"a\\nb" = 1': (r"'a\nb'",),
    "max_steps = 1\nmax-steps = 2": ("max_steps", "max-steps"),
    'milestones = "30,60"': ("milestones", "30,60"),
    "batch_size = 4\nlocal_batch_size = 4": ("batch-size", "local-batch-size"),
    'sync = "none"': ("sync", "ddp"),
    "epochs = 5\nepochs = 6": ("cannot be read",),
    "a = " + "[" * 5000: (),
}


def refused(capsys, *words, part="PartThree"):
    """Return the one line with which ``main`` refuses a command line; check status and stdout."""
    how = {"path": f"{part}/main.py", "description": "", "sync_choices": SYNCS[part]}
    # What is accepted by mistake is only printed.
    status = main(part, arguments=["--print-config", *map(str, words)], **how)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("content", [pytest.param(content, id=content[:30]) for content in WRONG])
def test_a_wrong_recipe_is_one_line_with_file_key_and_value(content, tmp_path, capsys):
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(content + "\n")
    error = refused(capsys, "--recipe", recipe)
    for words in (str(recipe), *WRONG[content]):
        assert words in error, error
    assert len(error) < 1000


LONG_NAME = "a" * 10_000


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("wide-resnet", ("'wide-resnet'", *NAMES)),
        ("/nowhere/mine.toml", ("no file /nowhere/mine.toml", *NAMES)),
        (f"{LONG_NAME}.toml", ("aaa…aaa", "aaa.toml", *NAMES)),
        ("new\nline.toml", ("new line.toml", *NAMES)),
        ("new\nline", (r"'new\nline'", *NAMES)),
        ("folder.toml", ("folder.toml is a folder, not a regular file",)),
        ("./fifo", ("fifo is a FIFO, not a regular file",)),
        ("binary.toml", ("binary.toml cannot be read",)),
    ],
    ids=range(8),
)
def test_a_recipe_that_is_not_there_or_no_file_is_one_line(
    name, named, tmp_path, capsys, monkeypatch
):
    """The line says what is there instead, or lists the recipes that there are."""
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    os.mkfifo("fifo")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00epochs")
    error = refused(capsys, "--recipe", name)
    assert all(words in error for words in named), error
    assert len(error) < 1000


@pytest.mark.parametrize("flags", ["data-dir", "output-dir", "resume", "checkpoint", "compute"])
@pytest.mark.parametrize("name", [LONG_NAME, "new\nline", "nul\0"], ids=["long", "line", "nul"])
def test_a_path_that_no_system_takes_is_one_line(flags, name, capsys):
    error = refused(capsys, f"--{flags}", name)
    assert f"--{flags}: got " in error
    assert len(error) < 300


def test_a_wrong_flag_is_not_blamed_on_the_recipe(capsys):
    error = refused(capsys, "--recipe", "vgg11-cifar10-fast", "--epochs", 0)
    assert error.startswith("error: --epochs: got 0")
    error = refused(capsys, "--recipe", "wide-resnet-cifar100", "--batch-size", 4, "-b", 4)
    assert "--batch-size" in error
    assert "recipe" not in error


def test_gpus_that_are_not_there_are_one_line(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = refused(capsys, "--cuda", "6,7", "--no-print-config")
    assert "--gpu-ids: got 6,7" in error


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--recipe resnet50-cifar100 --batch-size 64", "each pass of a rank has 32; .* give -b 64"),
        ("--recipe resnet50-cifar100 -b 64", None),
        ("--recipe wide-resnet-cifar100 --batch-size 64", None),
        ("--target-accuracy 0.8 --patience 3", "epoch. .*-accuracy and --patience .*wide-resnet-c"),
        ("--dataset cifar100 --epochs 5", "5 epochs. .*add --recipe wide-resnet-cifar100 or resn"),
        ("--accumulation-steps 2", "add --recipe resnet18-transfer-cifar10"),
        ("--log-wandb --model resnet18", None),
        ("--dataset digits --accumulation-steps 2", None),
        ("--epochs 3 --lr 0.1", None),
    ],
)
def test_who_trains_something_else_than_meant_is_told(command, said):
    plan = SimpleNamespace(shards=2, batch_size=64)
    setup = SimpleNamespace(config=parse(command), launch=LaunchSpec(), plan=plan, entries={})
    setup.world, setup.amp = World(size=2), (None, "")
    notices = run_warnings(setup)
    assert len(notices) == (said is not None)
    assert said is None or re.search(said, notices[0])


@pytest.mark.slow
def test_the_assignments_recipe_and_a_name_for_its_runs(tmp_path, images):
    words = ["--recipe", "cs744", "--dataset", "folder", "--data-dir", images, "--max-steps", 2]
    words += ["--batch-size", 8, "--output-dir", tmp_path, "--experiment", "mine", *TINY]
    for ended in run_part("PartTwo", *words, "--sync", "all_reduce", ranks=2, cwd=tmp_path):
        assert ended.status == 0, ended.err
    config = json_of(only_run_folder(tmp_path, "mine"), "config")
    asked = {"learning_rate": 0.1, "schedule": "constant", "nesterov": False, "momentum": 0.9}
    assert config.items() >= (asked | {"weight_decay": 1e-4, "batch_size": 8}).items()
    recipe = parse("--recipe cs744")
    assert (recipe.max_steps, recipe.batch_size, recipe.model) == (40, 256, "vgg11")


# --- every recipe runs, in every way to start it ---


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder with 24 training and 8 test images in two classes."""
    return make_image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
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


def quick(recipe, images, output, *more, steps=("--max-steps", 2)):
    """Return flags for two steps on a few images: the second shows what the first one breaks."""
    words = ["--recipe", recipe, "--dataset", "folder", "--data-dir", images]
    return [*words, "--output-dir", output, *steps, "--log-every", 1, "--no-amp", *more]


def under(launcher, *words, cwd):
    """Run Part Three on two ranks under one of torch's launchers, in a clean environment."""
    own = os.environ.items()
    clean = {name: value for name, value in own if name not in LAUNCHERS_VARIABLES}
    place = f"--nproc-per-node 2 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    part = [str(ROOT / "PartThree" / "main.py"), *map(str, words)]
    command = [sys.executable, "-m", launcher, *place, *part]
    env = clean | {"OMP_NUM_THREADS": "1"}
    return Started(command, cwd=cwd, env=env).end(timeout_seconds=250)


def check(ended, output, recipe, *, ranks, model, ema=False):
    """Check what each run of a recipe writes; return its folder and the summary."""
    assert ended.status == 0, ended.out + ended.err
    assert "Traceback" not in ended.err
    folder = only_run_folder(output, recipe)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d", folder.name)
    summary = json_of(folder, "summary")
    assert (summary["recipe"], summary["nodes"], summary["model"]) == (recipe, ranks, model)
    assert summary["ranks_hold_equal_weights"] is True
    assert summary["train_loss_last_step"] > 0
    epochs = json_lines(folder / "epochs.jsonl")
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, len(epochs) + 1))
    assert summary["total_seconds"] >= sum(epoch["seconds"] for epoch in epochs)
    # Each image counts once on any number of ranks, as in the report, which has all predictions.
    last = epochs[-1]
    assert last["val_accuracy"] == pytest.approx(summary["test_accuracy"])
    assert last["val_loss"] == pytest.approx(summary["test_loss"], rel=1e-3)
    assert last["ema_val_accuracy"] == pytest.approx(summary["ema_test_accuracy"])
    assert (summary["ema_test_accuracy"] is not None) == (folder / "report_ema.txt").exists() == ema
    assert ("ema_state_dict" in load_checkpoint(folder / "checkpoints" / "best.pt")) == ema
    assert len(re.findall(r"Epoch \d+: .*validation loss .* s\b", ended.out)) == len(epochs)
    return folder, summary


@pytest.mark.slow
def test_wide_resnet_as_one_process_profiled(tmp_path, images):
    """Model 16-4 by flag, mixed precision, and a trace of the steps after the second."""
    recipe, model = "wide-resnet-cifar100", "wide_resnet16_4"
    more = ("--model", model, "--amp", "--batch-size", 4, "--max-steps", 4)
    words = quick(recipe, images, tmp_path, *more, "--profile", "--deterministic")
    [ended] = run_part("PartThree", *words, cwd=tmp_path)
    folder, summary = check(ended, tmp_path, recipe, ranks=1, model=model)
    assert "rate 0.01" in ended.out
    assert "notice: --deterministic changes nothing on a CPU: a run re" in ended.out
    assert "Target accuracy reached" not in ended.out
    assert (summary["steps"], summary["global_batch_size"]) == (4, 4)
    trace = json_of(folder, "profile_rank0")
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any(name.startswith("aten::conv") for name in names)
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
    assert "ProfilerStep#1" not in names, "the first steps warm up"


RUNS = {  # recipe: how it is started, its flags, and what it says
    # the rate scales with the global batch, not the ranks
    "wide-resnet-cifar100-full": (
        "told",
        "--model wide_resnet16_4 --batch-size 4 --scale-lr --reference-batch-size 8 "
        "--schedule constant --lr 0.01",
        "rate 0.005",
    ),
    "resnet50-cifar100": ("torchrun", "-b 2", "batch: 2 per rank x 2 ranks = 4 global"),
    # -b in place of its global batch; the recipe before it trains ResNet-50
    "resnet50-cifar100-fast": ("alone", "--model tiny -b 4", "batch: 4"),
    "resnet-cifar10-ema": (
        "itself",
        "--distributed --world-size 2 --epochs 200 --local-batch-size 2 --lr 0.01 --use-ema",
        "gloo",
    ),
}
WITH_A_TEST_OF_ITS_OWN = {
    *("wide-resnet-cifar100", "resnet18-transfer-cifar10", "vgg11-cifar10-fast", "cs744")
}


def test_every_recipe_is_trained_here():
    assert set(NAMES) == WITH_A_TEST_OF_ITS_OWN | RUNS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_runs_in_each_way_to_start_it(recipe, tmp_path, images):
    """Alone; told its place by flags; under torchrun; or one command that starts its ranks."""
    way, flags, said = RUNS[recipe]
    words = [*quick(recipe, images, tmp_path), *flags.split()]
    if way == "torchrun":
        ended = [under("torch.distributed.run", *words, cwd=tmp_path)]
    else:
        ranks = 2 if way == "told" else 0
        ended = run_part("PartThree", *words, ranks=ranks, cwd=tmp_path, timeout_seconds=280)
    assert [one.status for one in ended] == [0] * len(ended), ended
    config = parse(list(map(str, words)))
    ranks = 1 if way == "alone" else 2
    _, summary = check(ended[0], tmp_path, recipe, ranks=ranks, model=config.model, ema=config.ema)
    assert summary["global_batch_size"] == 4
    assert said in ended[0].out


@pytest.mark.slow
@pytest.mark.parametrize("unfreeze", [False, True])
def test_transfer_learning_with_a_dist_url(tmp_path, images, weights, unfreeze):
    """Only rank 0 has the file, whose weights all layers but the last keep without --unfreeze."""
    recipe = "resnet18-transfer-cifar10"
    words = quick(recipe, images, tmp_path, "--input-size", 32, "-b", 4)
    words += ["--accumulation_steps", 2, "--dist_url", f"tcp://127.0.0.1:{free_port()}"]
    words += ["--world-size", 2, "--threads", 1, "--checkpoint", "latest.pth"]
    words += ["--unfreeze"] if unfreeze else []
    started = [
        start_part("PartThree", *words, "--rank", rank, "--pretrained-weights", file, cwd=tmp_path)
        for rank, file in enumerate([weights, "not-here"])
    ]
    ended = [rank.end() for rank in started]
    assert [one.status for one in ended] == [0, 0], ended
    folder, _ = check(ended[0], tmp_path, recipe, ranks=2, model="resnet18_transfer")
    assert f"pretrained weights from {weights}" in ended[0].out
    assert "4 per rank x 2 micro-batches x 2 ranks = 16 global" in ended[0].out
    local = [step["local_samples"] for step in json_lines(folder / "metrics.jsonl")]
    assert sum(local) == 12, "half of the 24 are rank 0's"

    latest = load_checkpoint(tmp_path / "latest.pth")
    assert latest["step"] == 2
    others = changed_weights(latest, weights)
    assert bool(others) == unfreeze
    if unfreeze:
        assert {"conv1.weight", "bn1.running_mean", "layer4.1.conv2.weight"} <= others
    assert len(latest["optimizer_state_dict"]["state"]) == (62 if unfreeze else 2)


def changed_weights(checkpoint, weights):
    """Return which weights of all but the last layer differ from those of the file."""
    source = torch.load(weights, weights_only=True)
    state = checkpoint["model_state_dict"]
    own = {name.removeprefix("network."): value for name, value in state.items()}
    kept = [name for name in own if not name.startswith("fc.")]
    return {name for name in kept if not torch.equal(own[name], source[name])}


@pytest.mark.slow
def test_a_target_that_is_reached_ends_all_ranks(tmp_path, images):
    """With ``torch.distributed.launch``; any accuracy reaches the target, twice in a row."""
    recipe = "vgg11-cifar10-fast"
    words = quick(recipe, images, tmp_path, "--epochs", 5, "--batch-size", 8, steps=())
    words += ["--target-accuracy", 0.001, "--patience", 2, "--warmup-epochs", 1]
    ended = under("torch.distributed.launch", *words, cwd=tmp_path)
    folder, summary = check(ended, tmp_path, recipe, ranks=2, model="vgg11", ema=True)
    assert ended.out.count("Target accuracy reached in epoch 2: 0.001 in 2 epochs in a row") == 1
    assert "Target accuracy" not in ended.err
    assert [epoch["epoch"] for epoch in json_lines(folder / "epochs.jsonl")] == [1, 2]
    assert summary["last_step"] == 6
    assert "15 steps, 3 per epoch" in ended.out, "the schedule was made for all five"
    logs = sorted(folder.glob("logs_rank*.txt"))
    assert [len(path.read_text().splitlines()) for path in logs] == [2, 2]


def test_without_pretrained_weights_nothing_is_trained(tmp_path, images):
    """No network, no file: one line and status 1 on both ranks, and no random weights."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    env = {"TORCH_HOME": str(tmp_path / "torch"), "no_proxy": ""}
    env |= dict.fromkeys(("http_proxy", "https_proxy"), nowhere)
    words = quick("resnet18-transfer-cifar10", images, tmp_path / "out", "--input-size", 32)
    ended = run_part("PartThree", *words, "-b", 4, ranks=2, cwd=tmp_path, env=env)
    assert [one.status for one in ended] == [1, 1], ended
    for rank, one in enumerate(ended):
        assert "Traceback" not in one.err
        assert f"error (rank {rank}): " in one.err
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in ended[0].err
    assert "give --pretrained-weights FILE" in ended[0].err
    folder = only_run_folder(tmp_path / "out", "resnet18-transfer-cifar10")
    assert not (folder / "metrics.jsonl").exists()
    assert not list(folder.rglob("*.pt"))


@pytest.mark.slow
def test_resume_auto_goes_on_from_the_file_of_checkpoint(tmp_path, images, weights):
    """It works without the first run's folder and without the pretrained file."""
    recipe, kept = "resnet18-transfer-cifar10", tmp_path / "kept.pth"
    words = quick(recipe, images, tmp_path, "--epochs", 2, "--warmup-epochs", 1, steps=())
    words += ["--input-size", 32, "-b", 4, "--accumulation-steps", 2, "--checkpoint", kept.name]
    first = (*words, "--pretrained-weights", weights, "--stop-after-epoch", 1)
    second = (*words, "--resume", "auto")
    for flags, epoch, steps in ((first, 1, [1, 2, 3]), (second, 2, [4, 5, 6])):
        [ended] = run_part("PartThree", *flags, cwd=tmp_path)
        assert ended.status == 0, ended.err
        assert ("pretrained weights from" in ended.out) == (epoch == 1)
        assert ("resuming from kept.pth, step 3" in ended.out) == (epoch == 2)
        latest = load_checkpoint(kept)
        assert (latest["epoch"], latest["step"]) == (epoch, steps[-1])
        assert changed_weights(latest, weights) == set()
        metrics = only_run_folder(tmp_path, recipe) / "metrics.jsonl"
        assert [step["step"] for step in json_lines(metrics)] == steps
        shutil.rmtree(tmp_path / recipe)


@pytest.mark.slow
@pytest.mark.cifar
@needs_cifar100
def test_a_recipe_on_the_real_cifar100(tmp_path):
    """CIFAR-100 has 100 classes and 10,000 test images, and each image counts once."""
    recipe, model = ["--recipe", "wide-resnet-cifar100-full"], ["--model", "tiny"]
    short = ["--no-validate", "--no-amp", "--max-steps", 2, "--batch-size", 16]
    [ended] = run_part("PartThree", *recipe, *model, *short, "--output-dir", tmp_path, cwd=tmp_path)
    assert ended.status == 0, ended.err
    folder = only_run_folder(tmp_path, "wide-resnet-cifar100-full")
    report = json_of(folder, "report")
    assert (report["samples"], len(report["class_names"])) == (10_000, 100)
    assert "tiny (13,140 parameters) on cifar100 (50,000 training images)" in ended.out
    assert not (folder / "checkpoints" / "best.pt").exists()
