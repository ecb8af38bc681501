"""Flags, invalid values, and how flags combine with torchrun's environment.

Nothing here needs torch.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import _newest_checkpoint, main
from common.config.parser import build_parser, parse_arguments
from common.config.schema import Config
from common.distributed.launch_env import LaunchSpec, resolve_launch
from common.errors import UserError
from common.models import MODELS
from common.utils.environment import DEFAULT_MASTER_PORT
from common.utils.paths import REPOSITORY
from tests.helpers import ROOT, start_part

BY_HAND = ("gather_scatter", "all_reduce")
SYNCS = {"PartOne": ("none",), "PartTwo": BY_HAND, "PartThree": ("ddp",)}
CLUSTER = ("-M", "10.0.0.1", "-N", "2", "-R", "0")


def _parse(*arguments, part="PartTwo", defaults=None):
    return parse_arguments(
        part, "a description", defaults or {}, SYNCS[part], [str(one) for one in arguments]
    )


def _main(*arguments, part="PartTwo"):
    return main(
        part,
        path=f"{part}/main.py",
        description="a description",
        sync_choices=SYNCS[part],
        arguments=[str(one) for one in arguments],
    )


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)


# --- invalid values ---

_POSITIVE_WHOLE = ("0", "-1", "1.5", "nan", "inf", "many", "", "1e3", "0x10", "9" * 400)
_NOT_NEGATIVE = ("-1", "-0.001", "nan", "inf", "some", "", "1,5")
_ABOVE_ZERO = ("0", "-1", "nan", "inf", "fast", "", "0,1")
NONSENSE = {
    "--num-nodes": _POSITIVE_WHOLE,
    "--rank": ("-1", "2", "99", "1.5", "nan", "first", "", "9" * 400),
    "--master-port": ("0", "-1", "65536", "70000", "100000000000", "1.5", "http", "", "9" * 400),
    "--timeout": (*_ABOVE_ZERO, "86401", "1e300"),
    "--batch-size": _POSITIVE_WHOLE,
    "--local-batch-size": _POSITIVE_WHOLE,
    "--epochs": _POSITIVE_WHOLE,
    "--max-steps": _POSITIVE_WHOLE,
    "--stop-after-epoch": _POSITIVE_WHOLE,
    "--bucket-mb": (*_ABOVE_ZERO, "Auto", "auto,25"),
    "--topk-ratio": (*_ABOVE_ZERO, "1.1"),
    "--powersgd-rank": (*_POSITIVE_WHOLE, "1025"),
    "--averaging-period": _POSITIVE_WHOLE,
    "--untimed-steps": ("-1", "1.5", "nan", "inf", "some", "", "9" * 400),
    "--warmup-steps": ("-1", "1.5", "nan", "inf", "some", "", "9" * 400),
    "--warmup-epochs": _NOT_NEGATIVE,
    "--seed": ("-1", "1.5", "nan", "inf", "luck", "", str(2**31), "9" * 400),
    "--threads": (*_POSITIVE_WHOLE, "4097"),
    "--shards": _POSITIVE_WHOLE,
    "--local-rank": ("-1", "1.5", "nan", "first", "", "9" * 400),
    "--accumulation-steps": _POSITIVE_WHOLE,
    "--patience": _POSITIVE_WHOLE,
    "--checkpoint-every": _POSITIVE_WHOLE,
    "--save-every-epochs": _POSITIVE_WHOLE,
    "--keep-checkpoints": _POSITIVE_WHOLE,
    "--reference-batch-size": _POSITIVE_WHOLE,
    "--input-size": (*_POSITIVE_WHOLE, "31", "1025"),
    "--ema-decay": (*_ABOVE_ZERO, "1", "1.5"),
    "--label-smoothing": (*_NOT_NEGATIVE, "1"),
    "--target-accuracy": (*_ABOVE_ZERO, "85"),
    "--clip-norm": _ABOVE_ZERO,
    "--step-factor": (*_ABOVE_ZERO, "1.5"),
    "--normalise": ("ImageNet", "none", ""),
    "--flip": ("always", "Random", ""),
    "--cutout": ("-1", "1.5", "nan", "half", "", "33", "9" * 400),
    "--tta": ("crop", "Flip", ""),
    "--capture": ("on", "Auto", ""),
    "--log-every": _POSITIVE_WHOLE,
    "--learning-rate": _ABOVE_ZERO,
    "--momentum": (*_NOT_NEGATIVE, "1", "2"),
    "--weight-decay": _NOT_NEGATIVE,
    "--sync": ("none", "ddp", "ALL_REDUCE", "all-reduce", "", "nccl"),
    "--backend": ("mpi", "GLOO", ""),
    "--dataset": ("cifar", "mnist", "CIFAR10", ""),
    "--model": ("vgg", "resnet1", "VGG11", ""),
    "--schedule": ("linear", "Cosine", ""),
    "--opt": ("adam", "SGD", ""),
    "--amp-dtype": ("fp32", "float16", ""),
}


def _as_shown(text):
    """Return the ways a message may show a value: as quoted text or as a number."""
    shown = {repr(text)}
    for kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            shown.add(repr(kind(text)))
    return shown


_CASES = [
    pytest.param(flag, value, id=f"{flag}={value[:12]}")
    for flag, values in NONSENSE.items()
    for value in values
]


@pytest.mark.parametrize(("flag", "value"), _CASES)
def test_nonsense_value_is_one_line_and_status_2(flag, value, capsys):
    """One line on stderr names the flag and the value; status 2, no traceback, no run."""
    cluster = [
        one
        for pair in zip(CLUSTER[::2], CLUSTER[1::2], strict=True)
        for one in pair
        if pair[0] not in {"--num-nodes": "-N", "--rank": "-R"}.get(flag, "")
    ]
    status = _main(*cluster, f"{flag}={value}")
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert flag in err
    assert any(got in err for got in _as_shown(value)), err


def test_every_number_and_every_choice_has_nonsense_above():
    """A new flag with a numeric type or choices must be added to NONSENSE."""
    checked = {
        "--" + spec.name.replace("_", "-")
        for spec in dataclasses.fields(Config)
        if spec.metadata and (spec.metadata["type"] in (int, float) or spec.metadata["choices"])
    }
    assert set(NONSENSE) == checked


@pytest.mark.parametrize(
    "flag", ["--master-ip", "--data-dir", "--mirror", "--resume", "--output-dir"]
)
def test_empty_text_is_refused(flag):
    """An empty path or address (a quoted unset shell variable) is an error that names the flag.

    It does not mean the current folder.
    """
    with pytest.raises(UserError, match=f"{flag}.*''"):
        _parse(f"{flag}=")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["--bach-size", "3"],
        ["stray"],
        ["--batch", "8"],
        ["-x"],
        ["--batch-size"],
        ["--debug=maybe"],
    ],
)
def test_unknown_or_incomplete_flags(arguments, capsys):
    """A misspelt, abbreviated, stray or valueless argument: one line that names it, status 2."""
    assert _main(*CLUSTER, *arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert arguments[0].partition("=")[0] in err


@pytest.mark.parametrize("value", [True, "4", 4.0, float("nan")])
def test_config_checks_types_without_the_parser(value):
    """A Config built in code gets the same checks: a bool, text or float is no batch size."""
    with pytest.raises(UserError, match=f"--batch-size: got {value!r}"):
        Config("PartOne", batch_size=value)


def test_limits_themselves_are_allowed():
    """The limits are inclusive."""
    config = _parse(
        "-N",
        5,
        "-R",
        4,
        "--master-port",
        65535,
        "--timeout",
        86400,
        "--seed",
        2**31 - 1,
        "--momentum",
        0,
        "--weight-decay",
        0,
        "--warmup-epochs",
        0,
        "--stop-after-epoch",
        1,
        "--threads",
        4096,
    )
    assert (config.rank, config.master_port, config.seed) == (4, 65535, 2**31 - 1)
    assert _parse("--master-port", 1).master_port == 1


def test_a_size_of_buckets_or_auto():
    assert (_parse("--bucket-mb", "9").bucket_mb, _parse().bucket_mb) == (9.0, None)
    assert _parse("--bucket-mb", "auto").bucket_mb == "auto"
    with pytest.raises(UserError, match="--bucket-mb: got 'fast', give a number, or auto"):
        _parse("--bucket-mb", "fast")
    with pytest.raises(UserError, match=r"--bucket-mb: got 0\.0, give a number above 0, or auto"):
        _parse("--bucket-mb", "0")


# --- synonyms, defaults and conflicts ---


@pytest.mark.parametrize(
    ("arguments", "setting", "expected"),
    [
        (["--lr", "0.5"], "learning_rate", 0.5),
        (["--base-lr", "0.5"], "learning_rate", 0.5),
        (["--base_lr=0.5"], "learning_rate", 0.5),
        (["--learning_rate", "0.5"], "learning_rate", 0.5),
        (["-b", "16"], "local_batch_size", 16),
        (["--local_batch_size", "16"], "local_batch_size", 16),
        (["--batch_size=64"], "batch_size", 64),
        (["--global-batch-size", "64"], "batch_size", 64),
        (["--world-size", "4"], "num_nodes", 4),
        (["--world_size", "4"], "num_nodes", 4),
        (["--num_nodes=4"], "num_nodes", 4),
        (["-N", "4"], "num_nodes", 4),
        (["-R", "3"], "rank", 3),
        (["-M", "10.0.0.9"], "master_ip", "10.0.0.9"),
        (["--master_ip", "10.0.0.9"], "master_ip", "10.0.0.9"),
        (["--use-amp"], "amp", True),
        (["--use_amp"], "amp", True),
        (["--amp"], "amp", True),
        (["--no-amp"], "amp", False),
        (["--no_amp"], "amp", False),
        (["--no-use-amp"], "amp", False),
        (["--debug"], "debug", True),
        (["--output_dir=/tmp/a_b"], "output_dir", Path("/tmp/a_b")),
        (["--output-dir", "/tmp/a_b"], "output_dir", Path("/tmp/a_b")),
        (["--resume", "my_runs/Epoch_1.pt"], "resume", "my_runs/Epoch_1.pt"),
        (["--sync", "all_reduce"], "sync", "all_reduce"),
        (["--sync=all_reduce"], "sync", "all_reduce"),
        ([], "sync", "gather_scatter"),
        ([], "amp", None),
        ([], "debug", False),
    ],
)
def test_flags_and_synonyms(arguments, setting, expected):
    """Synonyms set the same setting; an underscore equals a dash in a flag, not in a value."""
    got = getattr(_parse(*arguments), setting)
    assert got == expected
    assert type(got) is type(expected)


def test_part_one_has_no_cluster_flags_and_part_two_no_other_sync():
    """PartOne refuses --rank; parts with one strategy have no --sync flag."""
    assert _parse(part="PartOne").sync == "none"
    assert _parse(part="PartThree").sync == "ddp"
    for part, flag in (
        ("PartOne", "--rank=0"),
        ("PartOne", "--sync=none"),
        ("PartThree", "--sync=ddp"),
    ):
        with pytest.raises(UserError, match=flag.partition("=")[0]):
            _parse(flag, part=part)


def test_a_parts_defaults_give_way_to_flags():
    """A part's default applies only if the flag is not given."""
    assert _parse(defaults={"dataset": "digits"}).dataset == "digits"
    assert _parse("--dataset", "cifar100", defaults={"dataset": "digits"}).dataset == "cifar100"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch-size", 64, "--local-batch-size", 16], ("--batch-size", "--local-batch-size")),
        (["-b", 16, "--batch-size", 64], ("--batch-size", "--local-batch-size")),
        (["--warmup-steps", 5, "--warmup-epochs", 1], ("--warmup-steps", "--warmup-epochs")),
        (["--stop-after-epoch", 3, "--epochs", 2], ("--stop-after-epoch", "3", "--epochs", "2")),
        (["--rank", 2, "--num-nodes", 2], ("--rank", "2", "--num-nodes", "0 to 1")),
        (["--rank", 0, "--num-nodes", 0], ("--num-nodes", "0")),
    ],
)
def test_flags_that_contradict_each_other(arguments, named, capsys):
    """Two flags for one setting, or a rank out of range: one line names both; status 2."""
    assert _main("--master-ip", "10.0.0.1", *arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(name in err for name in named), err


def test_global_batch_size():
    """--batch-size is global, --local-batch-size per rank; the default is 256 (global)."""
    assert [_parse().global_batch_size(world) for world in (1, 3, 4)] == [256, 256, 256]
    assert [_parse("--batch-size", 100).global_batch_size(world) for world in (1, 3, 4)] == [
        100,
        100,
        100,
    ]
    assert [_parse("-b", 100).global_batch_size(world) for world in (1, 3, 4)] == [100, 300, 400]


def test_defaults_that_depend():
    """The default rate depends on the optimiser; data and reports are in the repository."""
    assert _parse().peak_learning_rate == 0.02
    assert _parse("--opt", "adamw").peak_learning_rate == 0.001
    assert _parse("--opt", "adamw", "--lr", 0.1).peak_learning_rate == 0.1
    assert _parse().data_folder == REPOSITORY / "data"
    assert _parse().reports_folder == REPOSITORY / "reports"
    assert _parse("--data-dir", "/d", "--output-dir", "/o").data_folder == Path("/d")
    assert _parse("--data-dir", "/d", "--output-dir", "/o").reports_folder == Path("/o")
    assert REPOSITORY == ROOT


def test_config_is_frozen_and_plain_as_json():
    """Settings cannot change after the check; config.json holds all but secrets as plain values."""
    import json

    config = _parse("--data-dir", "/d", *CLUSTER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 5
    plain = json.loads(json.dumps(config.as_json()))
    assert set(plain) == {spec.name for spec in dataclasses.fields(Config)} - {"run_token"}
    assert plain["data_dir"] == "/d"
    assert plain["part"] == "PartTwo"


def test_shared_settings():
    """Ranks compare what affects training, not rank, paths or threads, which may differ."""
    shared = _parse(*CLUSTER, "--data-dir", "/d", "--threads", 2).shared_settings()
    for flag in (
        "--rank",
        "--master-ip",
        "--master-port",
        "--num-nodes",
        "--data-dir",
        "--output-dir",
        "--threads",
        "--resume",
        "--mirror",
        "--debug",
    ):
        assert flag not in shared
    for flag in (
        "--sync",
        "--model",
        "--dataset",
        "--batch-size",
        "--local-batch-size",
        "--epochs",
        "--max-steps",
        "--stop-after-epoch",
        "--seed",
        "--amp",
        "--amp-dtype",
        "--learning-rate",
        "--opt",
        "--schedule",
        "--warmup-steps",
        "--warmup-epochs",
        "--momentum",
        "--weight-decay",
        "--timeout",
        "--backend",
    ):
        assert flag in shared
    assert (
        _parse(*CLUSTER).shared_settings()
        == _parse("-M", "x", "-N", 2, "-R", 1, "--threads", 3).shared_settings()
    )
    assert _parse("--seed", 1).shared_settings() != _parse("--seed", 2).shared_settings()
    assert _parse("--opt", "adamw").shared_settings()["--opt"] == "adamw"


# --- rank, world size and address of this process ---

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
}


def test_launch_from_flags():
    """The three flags set the launch; ranks learn local rank and local size later (None)."""
    assert resolve_launch(_parse(*CLUSTER).launch_flags, {}) == LaunchSpec(
        0, 2, "10.0.0.1", DEFAULT_MASTER_PORT, None, None
    )
    launch = resolve_launch(
        _parse("-M", "h", "-N", 4, "-R", 3, "--master-port", 1234).launch_flags, {"PATH": "/bin"}
    )
    assert (launch.rank, launch.size, launch.master_ip, launch.master_port) == (3, 4, "h", 1234)


def test_launch_from_torchrun():
    """torchrun's environment sets everything."""
    assert resolve_launch(_parse().launch_flags, TORCHRUN) == LaunchSpec(
        1, 3, "127.0.0.1", 4000, 1, 3, largest_size=3
    )


def test_flags_that_repeat_torchrun_are_fine():
    """A flag that repeats the environment, also by another name of the host, is accepted."""
    flags = ["-N", 3, "-R", 1, "-M", "localhost", "--master-port", 4000]
    assert resolve_launch(_parse(*flags).launch_flags, TORCHRUN) == resolve_launch(
        _parse().launch_flags, TORCHRUN
    )


def test_no_launch_without_flags_and_environment():
    """Without flags and environment the result is None.

    An incomplete torchrun environment, left by a scheduler, does not count.
    """
    assert resolve_launch(_parse().launch_flags, {}) is None
    assert resolve_launch(_parse("--master-port", 4000).launch_flags, {}) is None
    assert resolve_launch(_parse().launch_flags, {"WORLD_SIZE": "3"}) is None
    assert resolve_launch(_parse(*CLUSTER).launch_flags, {"WORLD_SIZE": "7"}).size == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-R", 0], ("--rank 0", "RANK=1")),
        (["-N", 2], ("--num-nodes 2", "WORLD_SIZE=3")),
        (["-M", "10.9.9.9"], ("--master-ip 10.9.9.9", "MASTER_ADDR=127.0.0.1")),
        (["--master-port", 5000], ("--master-port 5000", "MASTER_PORT=4000")),
        (["-N", 3, "-R", 2], ("--rank 2", "RANK=1")),
    ],
)
def test_flags_that_contradict_torchrun(flags, named):
    """Each contradiction names the flag, the variable and both values."""
    with pytest.raises(UserError) as error:
        resolve_launch(_parse(*flags).launch_flags, TORCHRUN)
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["-M", "h"], ("--num-nodes", "--rank")),
        (["-N", 2], ("--master-ip", "--rank")),
        (["-R", 0], ("--master-ip", "--num-nodes")),
        (["-N", 2, "-R", 0], ("--master-ip",)),
        (["-M", "h", "-R", 0], ("--num-nodes",)),
        (["-M", "h", "-N", 2], ("--rank",)),
    ],
)
def test_part_of_the_three_flags(flags, missing, capsys):
    """One or two of the three flags: status 2, and the message lists exactly the missing ones.

    Rank 0 counts as given.
    """
    assert _main(*flags) == 2
    err = capsys.readouterr().err
    said = err.partition("without")[2].partition(":")[0]
    assert set(re.findall(r"--[a-z-]+", said)) == set(missing)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "1.0"),
        ("WORLD_SIZE", "three"),
        ("WORLD_SIZE", " "),
        ("MASTER_PORT", "http"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_WORLD_SIZE", "x"),
        ("RANK", "²"),
        ("RANK", "3"),
        ("RANK", "7"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_environment_that_makes_no_sense(name, value):
    """Text, a negative number, a rank beyond the size or a bad port: a UserError names it.

    The message gives the variable and the value.
    """
    with pytest.raises(UserError) as error:
        resolve_launch(_parse().launch_flags, TORCHRUN | {name: value})
    assert name in str(error.value)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


# --- from the command line ---


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start the entry points from another folder: without flags and with --epochs=0."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    running = {
        (part, flag): start_part(part, *([flag] if flag else []), cwd=cwd)
        for part, flag in (("PartTwo", ""), ("PartThree", ""), ("PartTwo", "--epochs=0"))
    }
    ended = {key: one.end(timeout_seconds=60) for key, one in running.items()}
    assert list(cwd.iterdir()) == []
    return ended


@pytest.mark.parametrize("part", ["PartTwo", "PartThree"])
def test_started_without_a_place(part, started):
    """Status 2 and empty stdout; stderr shows three ways to start the part.

    Each command names the real file and parses, and the commands for two machines cover both ranks.
    """
    ended = started[part, ""]
    assert ended.status == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    lines = [line.strip() for line in ended.err.splitlines()]
    commands = [
        shlex.split(line.removesuffix("&"), comments=True)
        for line in lines
        if line.startswith("python ")
    ]
    assert len(commands) == 3
    here, *several = commands
    assert here[2:] == ["--distributed", "--world-size", "2"]
    places = []
    for command in several:
        assert Path(command[1]).resolve() == ROOT / part / "main.py"
        config = _parse(*command[2:], part=part)
        launch = resolve_launch(config.launch_flags, {})
        places.append((launch.master_ip, launch.size, launch.rank))
    first, second = places
    assert first[:2] == second[:2]
    assert (first[1], first[2], second[2]) == (2, 0, 1)
    (torchrun,) = [shlex.split(line) for line in lines if line.startswith("torchrun ")]
    assert torchrun[1:3] == ["--nproc-per-node", "2"]
    assert Path(torchrun[3]).resolve() == ROOT / part / "main.py"


def test_nonsense_on_a_real_command_line(started):
    """The real entry point gives the same single line and the same status."""
    ended = started["PartTwo", "--epochs=0"]
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: --epochs: got 0, give a whole number of at least 1")
    assert ended.err.count("\n") == 1


def test_a_failure_names_the_newest_checkpoint_of_this_run_only(tmp_path):
    """Nothing is promised if this run has saved nothing; the path is whole."""
    config = _parse("--output-dir", tmp_path)
    assert _newest_checkpoint(config, begun=0.0) == ""
    folder = tmp_path / "PartTwo-gather_scatter" / "a run" / "checkpoints"
    folder.mkdir(parents=True)
    for epoch, seconds in ((9, 1000), (10, 2000)):
        (folder / f"Epoch_{epoch}.pt").touch()
        os.utime(folder / f"Epoch_{epoch}.pt", (seconds, seconds))
    assert _newest_checkpoint(config, begun=1500.0) == (
        f"\nThe newest checkpoint is {folder}/Epoch_10.pt. Continue from it with --resume auto."
    )
    assert _newest_checkpoint(config, begun=2500.0) == ""


@pytest.mark.parametrize("part", SYNCS)
def test_help_lists_the_flags_without_torch(part, tmp_path):
    """--help-all from another folder lists every flag and choice; it imports no torch or numpy.

    --help shows the basic flags only. Flags that merely repeat a default are hidden.
    """
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / part / "main.py"), "--help-all"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    imported = {
        line.rpartition("|")[2].strip()
        for line in ended.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "common.config.schema" in imported
    assert not {
        name
        for name in imported
        if name.partition(".")[0] in ("torch", "torchvision", "numpy", "sklearn")
    }
    words = set(re.findall(r"[\w-]+", ended.stdout))
    parser = build_parser(part, "", {}, SYNCS[part])
    flags = {name for action in parser._actions for name in action.option_strings}
    hidden = {name for name in flags if name.startswith("--no-")} | {"--nesterov"}
    hidden -= {"--no-nesterov", "--no-amp", "--no-use-amp"}
    assert flags - words == hidden
    assert set(MODELS) - {"tiny", "wide"} <= words, "but for those of tests"
    assert part != "PartTwo" or set(BY_HAND) <= words

    shown = build_parser(part, "", {}, SYNCS[part], show_all=False).format_help()
    basic = set(re.findall(r"--[\w-]+", shown))
    assert {"--dataset", "--epochs", "--lr", "--seed", "--resume", "--help-all"} <= basic
    assert ("--master-ip" in basic) == (part != "PartOne")
    assert not basic & {"--weight-decay", "--no-amp", "--print-config"}
    assert len(shown.splitlines()) < 60


def test_hidden_flags_are_still_accepted():
    assert _parse("--no-print-config", "--nesterov", "--no-debug").nesterov is True
    assert _parse("--print-config", "--no-print-config").print_config is False
    assert _parse("--no-nesterov").nesterov is False
