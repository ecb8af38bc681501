"""Write what users see and rely on as text: the files in ``tests/expectations/``, one per kind.

    python -m tests.helpers.expectations [KIND ...]     # after an intended change

Then read the diff in git. ``KINDS`` maps each file name to the function that creates its text from
the current code.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
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
"""Written once, by a run of ``RESUMABLE`` with --stop-after-epoch 1: it must stay readable."""

ON_DIGITS = (*TINY, "--dataset", "digits", "--run-name", "run")
SHORT = (*ON_DIGITS, "--batch-size", 32, "--epochs", 1, "--max-steps", 3, "--log-every", 1)
RESUMABLE = (*ON_DIGITS, "--batch-size", 512, "--epochs", 2, "--threads", 1)

VERSION = f"Python {sys.version_info.major}.{sys.version_info.minor}\n\n"
"""The first line of texts by argparse, which words them differently in each Python version."""

USAGES = FOLDER / "wrong_usage.txt"
"""Wrong usages, each with its answer; a new one is added to the file by hand, without answer."""
PROGRAMS = "# each runs, so it has a process of its own"


def flags():
    """Return each program's flags and commands, as its help shows them, with choices and defaults.

    A help's sentences are in the code only.
    """
    started = {part: _start(part, "--help-all", cwd=ROOT) for part in PARTS}
    of_lab = {" ".join(words): _start(*words, "--help", cwd=ROOT) for words in _lab_commands()}
    return VERSION + "\n".join(
        _sections({name: _entries(_printed(process)) for name, process in group.items()})
        for group in (started, of_lab)
    )


PARTS = ("PartOne", "PartTwo", "PartThree")


def _entries(text):
    """Return a line for each entry of a help text: "-N, --num-nodes N (default: 4)"."""
    lines = []
    for group in re.findall(r"^\S.*:\n((?: .+\n)+)", text, re.MULTILINE):
        for entry in re.split(r"^ {2,4}(?=\S)", group, flags=re.MULTILINE)[1:]:
            [name, *_] = re.split(r" {2,}|\n", entry)
            values = re.findall(r"\((?:one of|default).*?\)", " ".join(entry.split()))
            lines.append(" ".join([name, *values]))
    return lines


def _lab_commands():
    """Yield the words of every command and subcommand of lab."""
    from lab.cli import build_parser

    def below(parser, words):
        yield words
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield from below(child, (*words, name))

    return below(build_parser(), ("lab",))


def recipe_settings():
    """Return ``--print-config`` without a recipe and with one: a recipe's file records its own."""
    recipes = {"no recipe": (), "cs744": ("--recipe", "cs744")}
    started = {
        name: start_part("PartThree", *words, "--print-config", cwd=ROOT)
        for name, words in recipes.items()
    }
    return _sections({name: _printed(process).splitlines() for name, process in started.items()})


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
    way = ("PartTwo", "--sync", "all_reduce")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = (*way, *SHORT, "--timeline", "--ema", "--output-dir", folder)
        for ended in run_part(*words, cwd=folder, ranks=2):
            assert ended.status == 0, ended.err
        run = only_run_folder(folder, "PartTwo-all_reduce")
        paths = sorted(path for path in run.rglob("*") if path.is_file())
        return "".join(f"{path.relative_to(run)}\n{_keys_of(path)}" for path in paths)


def _keys_of(path):
    if path.suffix == ".pt":
        from common.checkpoint import load_checkpoint

        lines = [" ".join(sorted(load_checkpoint(path)))]
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text()
        lines = _keys(json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text))
    else:
        lines = []
    wrapped = (textwrap.wrap(line, 92, subsequent_indent="  ") for line in lines)
    return "".join(f"    {line}\n" for lines in wrapped for line in lines)


def _keys(value, place=""):
    """Return the keys of a JSON object in a line, then those of the objects in it with their place.

    A list has the place ``[]``, and the keys of its first entry stand for all.
    """
    if isinstance(value, list) and value:
        return _keys(value[0], f"{place}[]")
    if not isinstance(value, dict) or any(re.search(r"[^a-z_0-9-]", key) for key in value):
        return []  # a leaf, or a dict whose keys are data
    lines = [f"{place}: {' '.join(sorted(value))}".removeprefix(": ")]
    for key, inner in sorted(value.items()):
        lines += _keys(inner, f"{place}.{key}".removeprefix("."))
    return lines


def _start(part, *arguments, cwd):
    env = {"COLUMNS": "100", "NO_COLOR": "1"}
    if part == "lab":
        return start_lab(*arguments, cwd=cwd, env=env)
    return start_part(part, *arguments, cwd=cwd, env=env)


def _as_users_see(text):
    """Return a text without this machine's folders and the models of tests."""
    return re.sub(", ?tiny, ?wide", "", text.replace(str(ROOT), "ROOT")).rstrip()


def _sections(texts):
    """Return titled lists of lines; lines that the first has are not repeated in the others."""
    first = next(iter(texts.values()))
    sections = []
    for title, lines in texts.items():
        own = first if lines is first else [line for line in lines if line not in first]
        sections.append("\n".join([f"===== {title} =====", *map(_as_users_see, own)]))
    return "\n".join(sections) + "\n"


KINDS: dict[str, Callable[[], str]] = {
    "flags.txt": flags,
    "recipes.txt": recipe_settings,
    "wrong_usage.txt": wrong_usage,
    "run_folder.txt": run_folder,
}


def main(kinds):
    """Rewrite the files of these kinds, or of all kinds if the list is empty."""
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"error: {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    try:
        for name in kinds or KINDS:
            (FOLDER / name).write_text(KINDS[name]())
            print(f"wrote {(FOLDER / name).relative_to(ROOT)}")
    finally:
        kill_started()


if __name__ == "__main__":
    main(sys.argv[1:])
