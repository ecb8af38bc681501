"""``lab explain`` on the output of real failures (tests/lab/explain/logs) and successful runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cli import main
from lab.explain.diagnosis import KINDS, OWN, explain, known_errors, lines_of, read_lines
from tests.helpers import ROOT

LOGS = sorted(Path(__file__).with_name("logs").glob("*.txt"))
ONE_RANK = next(path for path in LOGS if path.stem == "own_exception-one_rank").read_text()
# A log's name begins with its first error ("good": none). These show others after it.
FOLLOWED_BY = {
    "collective_timeout": ["peer_gone"],
    "killed-loader": ["loader_worker"],
    "killed-torchrun": ["peer_gone"],
    "killed-torchrun_restart": ["stale_addresses"],
    "mismatched_parameters-ddp": ["peer_gone"],
    "mismatched_shapes": ["peer_gone"],
    "out_of_memory": ["peer_gone"],
    "own_exception-one_rank": ["peer_gone"],
    "own_exception-torchrun": ["peer_gone"],
    "stalled_rank-lab_nccl": ["nccl_timeout"],
}


def excerpts():
    """Return the logs of everyday.txt by name: "module_prefix-missing", for example."""
    text = Path(__file__).with_name("everyday.txt").read_text()
    parts = [part.split("\n", 1) for part in text.split("\n=== ")[1:]]
    return dict(parts)


EVERYDAY = excerpts()


def names_of(text):
    return [one.error.name for one in explain(lines_of(text))]


def told(*logs, capsys):
    assert main(["explain", *map(str, logs)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_is_told_as_what_its_name_says_with_the_line_that_shows_it(path):
    first = path.stem.partition("-")[0]
    expected = [] if first == "good" else [first, *FOLLOWED_BY.get(path.stem, [])]
    found = [one for one in explain(read_lines(str(path))) if one.error.kind != "note"]
    assert [one.error.name for one in found] == expected
    for one in found:
        text = path.read_text().split("\n")[one.line.number - 1]
        assert text == one.line.text
        patterns = one.error.patterns or (r"\w+Error: ",)
        assert any(re.search(pattern, text) for pattern in patterns)


@pytest.mark.parametrize("name", EVERYDAY)
def test_what_people_meet_who_write_such_programs(name):
    """Its cause comes first, also behind a launcher's prefix; ordinary output has none."""
    expected = name.partition("-")[0]
    for prefix in ("", "node 2| "):
        log = "".join(f"{prefix}{line}\n" for line in EVERYDAY[name].splitlines())
        found = [known.error.name for known in explain(lines_of(log))]
        if expected in ("good", "quoted"):
            assert found == []
        else:
            assert found[:1] == [expected]


def test_every_error_has_a_log():
    logs = [read_lines(str(path)) for path in LOGS] + [lines_of(log) for log in EVERYDAY.values()]
    shown = {known.error.name for log in logs for known in explain(log)}
    assert {error.name for error in known_errors()} <= shown


def test_a_line_far_away_proves_nothing():
    """`near` joins an error with its traceback, not with the whole log or another rank's."""
    error = "AttributeError: 'NoneType' object has no attribute 'data'"
    line = "    dist.all_reduce(param.grad.data)"
    assert names_of(f"{line}\n{error}") == ["gradient_is_none"]
    assert names_of(line + "\nstep" * 100 + f"\n{error}") == [OWN]
    apart = [*lines_of(line, file="rank0"), *lines_of(error, file="rank1")]
    assert [known.error.name for known in explain(apart)] == [OWN]


def test_no_sentence_is_built_from_a_cut_line(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(f"FrobError: {'a long message ' * 30}expected\n")
    (sentence,) = re.findall(r"cause: (.*)", told(log, capsys=capsys))
    assert "long message" not in sentence
    shown = re.search(r"line 1: (.*) …", told(log, capsys=capsys))
    assert set(shown[1].split()) == {"FrobError:", "a", "long", "message"}, "whole words"
    assert sentence.endswith(".")


def test_the_first_failure_comes_first_in_any_order_of_ranks_and_from_several_files(
    capsys, tmp_path
):
    """The survivor's log shows only a consequence; the other rank's log adds the cause."""
    ranks = ONE_RANK.split("--- rank 1\n")
    assert names_of("".join(ranks[::-1])) == [OWN, "peer_gone"]
    logs = [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    for log, text in zip(logs, ranks, strict=True):
        log.write_text(text)
    alone = told(logs[0], capsys=capsys)
    assert alone.startswith("1. another rank has ended")
    assert "These are echoes" in alone
    both = told(*logs, capsys=capsys)
    first = (
        rf"1\. an exception of the program itself\n   {logs[1]}:\d+: .*ValueError: could not read"
    )
    assert re.match(first, both)
    assert "echoes" not in both


def test_prefixes_and_colours_of_launchers_don_t_hide_an_error():
    line = "RuntimeError: [pair.cc:561] Connection closed by peer [10.0.0.2]:4493"
    for prefix in ("", "[rank1]: ", "node 2| ", "3: ", "\x1b[31m"):
        assert names_of(f"{prefix}{line}") == ["peer_gone"]
    assert names_of(f"[rank0]: {line}\nnode 1| KeyError: 'lr'") == [OWN, "peer_gone"]
    chain = "ValueError: a\n\nDuring handling of the above exception, another exception occurred:"
    last = explain(lines_of(f"{chain}\n\nKeyError: 'b'\n{line}"))[0]
    assert (last.line.text, last.count) == ("KeyError: 'b'", 1), "a chain is one failure"


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("train.sh: line 4:  8079 Killed        python train.py", ["killed"]),
        ("Killed", ["killed"]),
        ("[  17.3] Out of memory: Killed process 1234 (python) total-vm:9 kB", ["killed"]),
        ("srun: error: node3: task 0: Killed", ["killed"]),
        ("rank 1 was killed by SIGKILL: it said", ["killed"]),
        ("rank 1 failed first: it was killed by SIGSEGV; its message is above", ["crashed"]),
        # A successful run may mention the same things.
        ("timeout: 60 s, port 29500\nconnected to 127.0.1.1:29500", []),
        ("all ranks joined: 4 of 4\nchecking for duplicate images", []),
        ("Process group has been initialized\nmemory: 3 of 40 GB used", []),
        ("Killed 3 of 12 mutants\nNo errors in 1234 files", []),
    ],
)
def test_words_of_the_shell_and_the_kernel_and_words_about_errors(lines, names):
    assert names_of(lines) == names


def test_what_is_not_known_is_quoted_with_where_to_look(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(
        'epoch 1\nTraceback (most recent call last):\n  File "x.py", line 1\nFrobError: seven\n'
    )
    unknown = told(log, capsys=capsys)
    assert re.match(r"No known error in 4 lines\.", unknown)
    assert "line 4: FrobError: seven" in unknown
    own = "error (rank 1): --batch-size: got 1 for 2 ranks; give 4 or more"
    log.write_text(f"epoch 1\n[rank1]: {own}\nmore\n")
    quoted = told(log, capsys=capsys)
    assert f"log:2):\n   [rank1]: {own}" in quoted
    assert "No known error" not in quoted


def test_standard_input_an_empty_log_and_a_missing_one(tmp_path, capsys):
    log = next(path for path in LOGS if path.stem == "port_in_use").read_text()
    command = [sys.executable, "-m", "lab", "explain", "-"]
    out = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, input=log, timeout=90, check=True
    ).stdout
    assert re.match(r"1\. address already in use\n   line \d+: .*EADDRINUSE", out)
    assert "cure:  End that process" in out
    (tmp_path / "empty.txt").touch()
    assert "The log is empty" in told(tmp_path / "empty.txt", capsys=capsys)
    assert main(["explain", str(tmp_path / "none.txt")]) == 2
    error = r"error: lab explain: .*none\.txt cannot be read \(No such file or directory\)"
    assert re.match(error, capsys.readouterr().err)


def test_the_table_is_whole_and_stands_in_the_docs():
    text = (ROOT / "lab" / "explain" / "README.md").read_text()
    names = [error.name for error in known_errors()]
    for error in known_errors():
        assert error.kind in KINDS
        assert set(error.hides) <= set(names), error.name
        assert f"| {error.title} | {error.cause} | {error.cure} |" in text, error.name


# What messages of this project say, and patterns look for.
WORDS = """is taken on this machine
could not reach rank 0 at
ranks came to
was started twice
is not an address of this machine (it has
the ranks differ in
was started with --num-nodes
broke: another rank has ended
ended or was killed at
has not moved since
, this one, stood still for
the ranks did not call the same collective
not finite in epoch
Start every rank with the same version of this project
has a run token and
is not rank 0's: set the same value on every node
as torchrun sets them, but no
this machine has no interface
and could not be downloaded
could not be written (
but it is not this program
lost rank 0 at
is not an address and no known host name"""


def test_the_parts_still_say_what_is_looked_for():
    """If a message of this project changes, its pattern must change too."""
    source = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    patterns = [pattern.replace("\\", "") for error in known_errors() for pattern in error.patterns]
    for words in WORDS.splitlines():
        assert words in source
        assert any(words in pattern for pattern in patterns), words
