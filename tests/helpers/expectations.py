"""Write what users see and rely on as text: the files in ``tests/expectations/``, one per kind.

    python -m tests.helpers.expectations [KIND ...]     # after an intended change

Then read the diff in git. ``KINDS`` maps each file name to the function that creates its text from
the current code.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.processes import (
    TINY,
    kill_started,
    only_run_folder,
    run_part,
    start_lab,
    start_part,
    user_environment,
)

FOLDER = ROOT / "tests" / "expectations"
CHECKPOINT = FOLDER / "Epoch_1.pt"
"""Written once, with the first expectations, and never again: it must stay readable."""

PARTS = ("PartOne", "PartTwo", "PartThree")
SHORT = (
    *TINY,
    "--dataset",
    "digits",
    "--batch-size",
    32,
    "--epochs",
    1,
    "--max-steps",
    3,
    "--log-every",
    1,
    "--run-name",
    "run",
)
RESUMABLE = (
    *TINY,
    "--dataset",
    "digits",
    "--batch-size",
    512,
    "--epochs",
    2,
    "--threads",
    1,
    "--run-name",
    "run",
)
"""Two epochs of three steps; ``CHECKPOINT`` was saved after the first epoch."""

VERSION = f"Python {sys.version_info.major}.{sys.version_info.minor}\n\n"
"""The first line of texts by argparse, which words them differently in each Python version."""

USAGES = FOLDER / "wrong_usage.txt"
"""Wrong usages, each with its answer; a new one is added to the file by hand, without answer."""
PROGRAMS = "# each runs, so it has a process of its own"


def help_texts():
    """Return ``--help`` of the parts and of every command of lab."""
    commands = [(part,) for part in PARTS] + [("lab", *words) for words in _lab_commands()]
    started = [(command, _start(*command, "--help", cwd=ROOT)) for command in commands]
    return VERSION + _sections(
        (" ".join(command), _printed(process)) for command, process in started
    )


def _lab_commands():
    """Yield the words of every command and subcommand of lab."""
    import argparse

    from lab.cli import build_parser

    def below(parser, words):
        yield words
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield from below(child, (*words, name))

    return below(build_parser(), ())


def recipe_settings():
    """Return ``--print-config`` of every recipe."""
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    started = [
        (name, start_part("PartThree", "--recipe", name, "--print-config", cwd=ROOT))
        for name in names
    ]
    return _sections((name, _printed(process)) for name, process in started)


def _printed(process):
    end = process.end()
    assert end.status == 0, end.err
    return end.out


def read_usages():
    """Return (wrong usage, answer) of each, those that share a process first; then the others."""
    shared, own = USAGES.read_text().split(PROGRAMS)
    pairs = [re.findall(r"^\$ (.*)(?:\n(\d .*))?", part, re.MULTILINE) for part in (shared, own)]
    return [dict(one) for one in pairs]


def wrong_usage():
    """Return each wrong usage of the file, with its exit status and what it now says."""
    shared, own = read_usages()
    with tempfile.TemporaryDirectory() as folder:
        driver = [sys.executable, USAGES.parents[1] / "wrong_usage_driver.py", *shared]
        environment = user_environment(PYTHONPATH=str(ROOT))
        answers = subprocess.check_output(driver, cwd=folder, env=environment, timeout=120)
        now = dict(zip(shared, json.loads(answers.splitlines()[-1]), strict=True))
        started = {usage: _start(*usage.split(), cwd=Path(folder)) for usage in own}
        ends = {usage: process.end() for usage, process in started.items()}
        now |= {usage: (end.status, end.err) for usage, end in ends.items()}
    lines = []
    for line in USAGES.read_text().splitlines():
        if line.startswith("#"):
            lines.append(line)
        if line.startswith("$ "):
            status, said = now[line[2:]]
            lines += [line, f"{status} {_as_users_see(said.replace(folder, 'FOLDER'))}"]
    return VERSION + "\n".join(lines) + "\n"


def run_folder():
    """Return the files of a run on two ranks, with the keys of each JSON file and checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ended in run_part(
            "PartTwo",
            "--sync",
            "all_reduce",
            *SHORT,
            "--timeline",
            "--ema",
            "--output-dir",
            folder,
            cwd=folder,
            ranks=2,
        ):
            assert ended.status == 0, ended.err
        run = only_run_folder(folder, "PartTwo-all_reduce")
        paths = sorted(path for path in run.rglob("*") if path.is_file())
        return "".join(f"{path.relative_to(run)}\n{_keys_of(path)}" for path in paths)


def _keys_of(path):
    if path.suffix == ".json":
        found = _keys(json.loads(path.read_text()))
    elif path.suffix == ".jsonl":
        found = _keys(json.loads(path.read_text().splitlines()[0]))
    elif path.suffix == ".pt":
        from common.checkpoint import load_checkpoint

        found = sorted(load_checkpoint(path))
    else:
        return ""
    return "".join(f"    {key}\n" for key in found)


def _keys(value, above=""):
    """Return the dotted keys of nested dicts; for a list, those of its first entry under ``[]``."""
    if isinstance(value, list):
        return (
            _keys(value[0], f"{above}[]")
            if value and isinstance(value[0], dict | list)
            else [above]
        )
    if (
        not isinstance(value, dict)
        or not value
        or any(re.search(r"[^a-z_0-9-]", key) for key in value)
    ):
        return [above]  # a leaf, or a dict whose keys are data
    return sorted(
        key
        for name, entry in value.items()
        for key in _keys(entry, f"{above}.{name}" if above else name)
    )


def hashed_sources():
    """Return the files whose contents the ranks compare before they train."""
    from common.utils.source_hash import source_digests

    return "".join(f"{name}\n" for name in sorted(source_digests()))


def public_names():
    """Return every import that the docs or ``CONTRACT`` show; raise if one does not work."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = {
        " ".join(match.split())
        for page in pages
        for match in re.findall(
            r"^\s*(from (?:common|lab)[\w.]* import [^\n#]+)", page.read_text(), re.MULTILINE
        )
    }
    lines |= {
        f"from {module} import {name}" for module, names in CONTRACT.items() for name in names
    }
    for line in sorted(lines):
        module, names = re.fullmatch(r"from (\S+) import (.+)", line).groups()
        for name in names.split(","):
            getattr(importlib.import_module(module), name.split(" as ")[0].strip())
    return "".join(f"{line}\n" for line in sorted(lines))


CONTRACT = {
    "common.training": ("get_model_parameters", "prepare_model_for_training", "train_model"),
    "common.evaluation": ("prepare_model_for_evaluation", "evaluate_model", "generate_eval_report"),
    "common.training_engine": (
        "TrainingEngine",
        "distributed_train_worker",
        "launch_distributed_training",
    ),
    "common.sync.base": ("GradientSync",),
    "common.sync": ("STRATEGIES", "build_sync"),
    "common.models": ("MODELS", "build_model"),
    "common.data": ("DATASETS", "load_dataset"),
}
"""What code outside this project may import, in addition to what the docs show."""


def _start(part, *arguments, cwd):
    env = {"COLUMNS": "100", "NO_COLOR": "1"}
    return (
        start_lab(*arguments, cwd=cwd, env=env)
        if part == "lab"
        else start_part(part, *arguments, cwd=cwd, env=env)
    )


def _as_users_see(text):
    return (
        text.replace(str(ROOT), "ROOT")
        .replace(", tiny, wide", "")
        .replace(",tiny,wide", "")
        .rstrip()
    )


def _sections(texts):
    return "\n".join(f"===== {title} =====\n{_as_users_see(text)}\n" for title, text in texts)


KINDS: dict[str, Callable[[], str]] = {
    "help.txt": help_texts,
    "recipes.txt": recipe_settings,
    "wrong_usage.txt": wrong_usage,
    "run_folder.txt": run_folder,
    "hashed_sources.txt": hashed_sources,
    "public_names.txt": public_names,
}


def write_checkpoint(path):
    """Write the checkpoint after the first of two epochs; needed only for the first recording."""
    with tempfile.TemporaryDirectory() as name:
        [ended] = run_part(
            "PartOne", *RESUMABLE, "--stop-after-epoch", 1, "--output-dir", name, cwd=Path(name)
        )
        assert ended.status == 0, ended.err
        path.write_bytes(
            (Path(name) / "PartOne-none" / "run" / "checkpoints" / "Epoch_1.pt").read_bytes()
        )


def main(kinds):
    """Rewrite the files of these kinds, or of all kinds if the list is empty."""
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"error: {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    FOLDER.mkdir(exist_ok=True)
    try:
        for name in kinds or KINDS:
            (FOLDER / name).write_text(KINDS[name]())
            print(f"wrote {(FOLDER / name).relative_to(ROOT)}")
        if not CHECKPOINT.exists():
            write_checkpoint(CHECKPOINT)
            print(f"wrote {CHECKPOINT.relative_to(ROOT)}")
    finally:
        kill_started()


if __name__ == "__main__":
    main(sys.argv[1:])
