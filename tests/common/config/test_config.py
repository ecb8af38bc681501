"""Flags and their values: what is refused, what means the same, what --help says.

Nothing here needs torch.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import _newest_checkpoint, main
from common.config.parser import build_parser, parse_arguments
from common.config.schema import Config, flag, settings
from common.distributed.launch_env import LaunchSpec
from common.errors import UserError
from common.sync import strategy_options
from common.utils.limits import kind_and_meta
from common.utils.paths import REPOSITORY
from tests.helpers import ROOT, start_part

BY_HAND = ("gather_scatter", "all_reduce")
SYNCS = {"PartOne": ("none",), "PartTwo": BY_HAND, "PartThree": ("ddp",)}
CLUSTER = ("-M", "10.0.0.1", "-N", "2", "-R", "0")


def _parse(*arguments, part="PartTwo"):
    return parse_arguments(part, "a description", SYNCS[part], [str(one) for one in arguments])


def _main(*arguments, part="PartTwo"):
    """Run a part; what is accepted by mistake is only printed."""
    how = {"path": f"{part}/main.py", "description": "", "sync_choices": SYNCS[part]}
    return main(part, arguments=["--print-config", *map(str, arguments)], **how)


# --- invalid values ---

_POSITIVE_WHOLE = ("0", "-1", "1.5", "nan", "inf", "many", "", "1e3", "0x10", "9" * 400)
_NOT_NEGATIVE = ("-1", "-0.001", "nan", "inf", "some", "", "1,5")
_ABOVE_ZERO = ("0", "-1", "nan", "inf", "fast", "", "0,1")
_WHOLE = ("-1", "1.5", "nan", "inf", "some", "", "9" * 400)
_POSITIVE_NUMBERS = (
    "world-size batch-size local-batch-size epochs max-steps stop-after-epoch averaging-period "
    "shards accumulation-steps patience checkpoint-every save-every-epochs keep-checkpoints "
    "reference-batch-size log-every"
)


def _nonsense(meta):
    """Return what no number with these limits may be."""
    values = ["many", "", "nan", "inf"]
    if meta.ge is not None:
        values.append(str(meta.ge - 1))
    if meta.gt is not None:
        values.append(str(meta.gt))
    if meta.le is not None:
        values.append(str(meta.le + 1))
    return tuple(values)


NONSENSE = {f"--{name}": _POSITIVE_WHOLE for name in _POSITIVE_NUMBERS.split()} | {
    "--rank": _WHOLE,
    "--master-port": ("0", "-1", "65536", "70000", "100000000000", "1.5", "http", "", "9" * 400),
    "--timeout": (*_ABOVE_ZERO, "86401", "1e300"),
    "--meeting-timeout": (*_ABOVE_ZERO, "86401", "1e300"),
    "--bucket-mb": (*_ABOVE_ZERO, "Auto", "auto,25"),
    "--topk-ratio": (*_ABOVE_ZERO, "1.1"),
    "--powersgd-rank": (*_POSITIVE_WHOLE, "1025"),
    "--untimed-steps": _WHOLE,
    "--warmup-steps": _WHOLE,
    "--warmup-epochs": _NOT_NEGATIVE,
    "--seed": (*_WHOLE, str(2**31)),
    "--threads": (*_POSITIVE_WHOLE, "4097"),
    "--local-rank": _WHOLE,
    "--input-size": (*_POSITIVE_WHOLE, "31", "1025"),
    "--ema-decay": (*_ABOVE_ZERO, "1", "1.5"),
    "--label-smoothing": (*_NOT_NEGATIVE, "1"),
    "--target-accuracy": (*_ABOVE_ZERO, "85"),
    "--clip-norm": _ABOVE_ZERO,
    "--step-factor": (*_ABOVE_ZERO, "1.5"),
    "--normalise": ("ImageNet", "none", ""),
    "--flip": ("always", "Random", ""),
    "--cutout": (*_WHOLE, "33"),
    "--tta": ("crop", "Flip", ""),
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

for _name, _option in strategy_options().items():  # a new one needs no entry above
    _, _meta = kind_and_meta(_option.annotation)
    NONSENSE.setdefault(flag(_name), _nonsense(_meta))


def _as_shown(text):
    """Return how a message may show a value: quoted or as a number; a long one is cut."""
    shown = {repr(text)}
    for kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            shown.add(repr(kind(text)))
    return {one[:50] for one in shown}


@pytest.mark.parametrize("flag", NONSENSE)
def test_nonsense_value_is_one_line_and_status_2(flag, capsys):
    """One line on stderr names the flag and the value; status 2, no traceback, no run."""
    cluster = () if flag in ("--world-size", "--rank") else CLUSTER
    for value in NONSENSE[flag]:
        status = _main(*cluster, f"{flag}={value}")
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1), (value, err)
        assert err.startswith("error: ")
        assert flag in err
        assert any(got in err for got in _as_shown(value)), err


def test_every_number_and_every_choice_has_nonsense_above():
    """A new flag with a numeric type or choices must be added to NONSENSE."""
    checked = {
        flag(name)
        for name, known in settings().items()
        if known.kind in (int, float) or known.choices
    }
    assert set(NONSENSE) == checked


def test_ranks_that_are_started_by_hand_have_ten_minutes_to_come():
    for words, by_hand, seconds in (
        ("", True, 600),
        ("", False, 60),
        ("--timeout 5", True, 600),
        ("--timeout 5", False, 5),
        ("--meeting-timeout 7", True, 7),
    ):
        config = parse_arguments("PartThree", "", ("ddp",), words.split())
        assert config.meeting_seconds(by_hand=by_hand) == seconds
    assert LaunchSpec(token="").by_hand
    assert not LaunchSpec(token="a launcher's").by_hand
    assert not LaunchSpec(local_rank=0, token="").by_hand


@pytest.mark.parametrize(("ranks", "each", "fits"), [(3, 4, False), (3, 3, True), (1, 2, True)])
def test_a_node_has_no_more_ranks_than_there_are(ranks, each, fits, capsys):
    """One line on stderr, before any rank starts; one rank alone has nobody to share with."""
    words = f"--distributed -N {ranks} --ranks-per-node {each} --print-config".split()
    assert _main(*words) == (0 if fits else 2)
    _, err = capsys.readouterr()
    assert err.count("\n") == (0 if fits else 1)
    assert fits or f"--ranks-per-node: got {each} of --num-nodes {ranks}" in err


@pytest.mark.parametrize(
    "flag", ["--master-ip", "--data-dir", "--mirror", "--resume", "--output-dir"]
)
def test_empty_text_is_refused(flag):
    """An empty path or address, as of a quoted unset shell variable, is not the current folder."""
    with pytest.raises(UserError, match=f"{flag}.*''"):
        _parse(f"{flag}=")


@pytest.mark.parametrize("value", [True, "4", 4.0, float("nan")])
def test_config_checks_types_without_the_parser(value):
    """A Config built in code gets the same checks: a bool, text or float is no batch size."""
    with pytest.raises(UserError, match=f"--batch-size: got {value!r}"):
        Config("PartOne", batch_size=value)


def test_limits_themselves_are_allowed():
    words = "-N 5 -R 4 --master-port 65535 --timeout 86400 --momentum 0 --weight-decay 0"
    config = _parse(*words.split(), "--seed", 2**31 - 1, "--threads", 4096, "--warmup-epochs", 0)
    assert (config.rank, config.master_port, config.seed) == (4, 65535, 2**31 - 1)
    assert _parse("--master-port", 1).master_port == 1


# --- synonyms, defaults and conflicts ---


@pytest.mark.parametrize(
    ("arguments", "setting", "expected"),
    [
        (["--lr", "0.5"], "learning_rate", 0.5),
        (["--base-lr", "0.5"], "learning_rate", 0.5),
        (["-b", "16"], "local_batch_size", 16),
        (["--global-batch-size", "64"], "batch_size", 64),
        (["--num_nodes=4"], "world_size", 4),
        (["-N", "4"], "world_size", 4),
        (["--use-amp"], "amp", True),
        (["--no_amp"], "amp", False),
        (["--no-use-amp"], "amp", False),
        (["--output_dir=/tmp/a_b"], "output_dir", Path("/tmp/a_b")),
        (["--sync=all_reduce"], "sync", "all_reduce"),
        ([], "sync", "gather_scatter"),
        ([], "amp", None),
        (["--nesterov"], "nesterov", True),  # hidden in the help, as what follows
        (["--no-nesterov"], "nesterov", False),
        (["--print-config", "--no-print-config"], "print_config", False),
    ],
)
def test_flags_and_synonyms(arguments, setting, expected):
    """Synonyms set the same setting; an underscore equals a dash in a flag, not in a value."""
    got = getattr(_parse(*arguments), setting)
    assert got == expected
    assert type(got) is type(expected)


def test_part_one_has_no_flags_for_several_ranks():
    assert _parse(part="PartOne").sync == "none"
    for word in ("--rank=0", "--sync=none", "-N", "--num-nodes", "--run-token=x"):
        with pytest.raises(UserError, match=f"PartOne has no {word.partition('=')[0]}: it trains"):
            _parse(word, part="PartOne")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--warmup-steps", 5, "--warmup-epochs", 1], ("--warmup-steps", "--warmup-epochs")),
        (["--stop-after-epoch", 3, "--epochs", 2], ("--stop-after-epoch", "3", "--epochs", "2")),
        (["-b", 16, "--batch-size", 64], ("--batch-size", "--local-batch-size")),
    ],
)
def test_flags_that_contradict_each_other(arguments, named, capsys):
    """Two flags for one setting: one line names both; status 2."""
    assert _main("--master-ip", "10.0.0.1", *arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(name in err for name in named), err


def test_global_batch_size():
    """--batch-size is global, --local-batch-size per rank; the default is 256 (global)."""
    for words, sizes in (
        ((), [256, 256, 256]),
        (("--batch-size", 100), [100, 100, 100]),
        (("-b", 100), [100, 300, 400]),
    ):
        assert [_parse(*words).global_batch_size(ranks) for ranks in (1, 3, 4)] == sizes


def test_defaults_that_depend():
    """The default rate depends on the optimiser; reports are in the folder where one types."""
    assert _parse().peak_learning_rate == 0.02
    assert _parse("--opt", "adamw").peak_learning_rate == 0.001
    assert _parse("--opt", "adamw", "--lr", 0.1).peak_learning_rate == 0.1
    assert _parse().data_folder == REPOSITORY / "data"
    assert _parse().reports_folder == Path("reports")
    assert _parse("--data-dir", "/d", "--output-dir", "/o").data_folder == Path("/d")
    assert _parse("--data-dir", "/d", "--output-dir", "/o").reports_folder == Path("/o")
    assert REPOSITORY == ROOT


def test_config_is_frozen_and_plain_as_json():
    """Settings cannot change after the check; config.json holds all but secrets as plain values."""
    config = _parse("--data-dir", "/d", *CLUSTER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 5
    plain = json.loads(json.dumps(config.as_json()))
    names = {spec.name for spec in dataclasses.fields(Config)}
    assert set(plain) == names - {"run_token"}
    assert (plain["data_dir"], plain["part"], plain["world_size"]) == ("/d", "PartTwo", 2)


def test_shared_settings():
    """Ranks compare what affects training, not rank, paths or threads, which may differ."""
    shared = _parse(*CLUSTER, "--data-dir", "/d", "--threads", 2).shared_settings()
    own = "rank master-ip master-port world-size data-dir output-dir threads resume mirror debug"
    same = (
        "sync model dataset batch-size local-batch-size epochs max-steps stop-after-epoch seed amp "
        "amp-dtype learning-rate opt schedule warmup-steps warmup-epochs momentum weight-decay "
        "timeout backend"
    )
    assert not {f"--{name}" for name in own.split()} & shared.keys()
    assert {f"--{name}" for name in same.split()} <= shared.keys()
    other = _parse("-M", "x", "-N", 2, "-R", 1, "--threads", 3)
    assert _parse(*CLUSTER).shared_settings() == other.shared_settings()
    assert _parse("--seed", 1).shared_settings() != _parse("--seed", 2).shared_settings()
    assert _parse("--opt", "adamw").shared_settings()["--opt"] == "adamw"


# --- from the command line ---


@pytest.mark.parametrize("part", ["PartTwo", "PartThree"])
def test_started_without_a_place(part, tmp_path):
    """Each command that is shown parses, and those for two machines cover both ranks."""
    ended = start_part(part, cwd=tmp_path).end(timeout_seconds=60)
    assert (ended.status, ended.out) == (2, "")
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in ended.err
    lines = [line.strip() for line in ended.err.splitlines()]
    commands = [shlex.split(one, comments=True) for one in lines if one.startswith("python ")]
    here, *several = commands
    assert here[2:] == ["--distributed", "--world-size", "2"]
    assert {Path(command[1]).resolve() for command in commands} == {ROOT / part / "main.py"}
    configs = [_parse(*command[2:], part=part) for command in several]
    assert [(one.world_size, one.rank) for one in configs] == [(2, 0), (2, 1)]
    assert len({one.master_ip for one in configs}) == 1
    (torchrun,) = [shlex.split(line) for line in lines if line.startswith("torchrun ")]
    assert torchrun[1:3] == ["--nproc-per-node", "2"]
    assert Path(torchrun[3]).resolve() == ROOT / part / "main.py"


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
    """Flags that merely repeat a default are hidden; tests/expectations has the whole text."""
    command = [sys.executable, "-X", "importtime", str(ROOT / part / "main.py"), "--help-all"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", ended.stderr, re.MULTILINE))
    assert "common.config.schema" in imported
    assert not imported & {"torch", "torchvision", "numpy", "sklearn"}
    parser = build_parser(part, "", SYNCS[part])
    flags = {name for action in parser._actions for name in action.option_strings}
    hidden = {name for name in flags if name.startswith("--no-")} | {"--nesterov"}
    hidden -= {"--no-nesterov", "--no-amp", "--no-use-amp"}
    assert flags - set(re.findall(r"[\w-]+", ended.stdout)) == hidden
    basic = build_parser(part, "", SYNCS[part], show_all=False).format_help()
    assert ("--lr" in basic, "--clip-norm" in basic) == (True, False)
    assert ("--master-ip" in basic) == (part != "PartOne")
