"""Why a script could not be audited: the script's own error and what to try, on one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.audit.command import parse_command
from lab.audit.failures import explain_failure
from lab.audit.recording import read_recording
from lab.audit.runner import RunEnd

START = {"k": "start", "ppid": 1, "hint": 0, "variables": {}}


def explain(
    folder: Path,
    *,
    records: list[dict[str, Any]],
    output: str = "",
    status: int = 0,
    words: str = "python t.py --rank {rank}",
    **facts: Any,
) -> str | None:
    """Return the explanation of a run whose rank 0 has ended so."""
    lines = [json.dumps({"t": float(number), **one}) for number, one in enumerate(records)]
    if lines:
        (folder / "7.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "rank0.log").write_text(output)
    (folder / "rank1.log").touch()
    failed = (0,) if status else ()
    fields: dict[str, Any] = {"steps": 0} | facts
    end = RunEnd(2, folder, 1.0, (status, None), failed, **fields)
    return explain_failure(parse_command(words.split(), None), end, read_recording(folder))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ModuleNotFoundError: No module named 'einops.layers'", "Install einops.layers for"),
        ("RuntimeError: ifa != nullptr. Unable to find address for: ens3", "--isolate ens3"),
        ("OSError: [Errno 99] Cannot assign requested address", "--isolate ADDRESS"),
        ("OSError: [Errno 101] Network is unreachable", "--isolate ADDRESS"),
        ("socket.gaierror: [Errno -2] Name or service not known", "--isolate NAME"),
        ("EOFError: EOF when reading a line", "reads stdin"),
        ("urllib.error.URLError: <urlopen error [Errno 111]>", "put the data where"),
        ("ValueError: environment variable RANK expected, but not set", "torchrun"),
        ("KeyError: 'LOCAL_RANK'", "torchrun"),
        ("t.py: error: unrecognized arguments: --rank", "{nodes} and {rank} are replaced"),
        ("python: can't open file '/x/t.py': [Errno 2]", "cd to the folder"),
        ("RuntimeError: Dataset not found or corrupted.", "cd to the folder"),
        ("RuntimeError: errno: 98 - Address already in use", "give {port}"),
        ("AssertionError: Torch not compiled with CUDA enabled", "needs a GPU"),
        ("ValueError: the new group's world size should be less or equal", "number with --ranks"),
        ("ZeroDivisionError: division by zero", "First run the command without"),
    ],
)
def test_the_scripts_own_error_and_what_to_try(tmp_path: Path, error: str, advice: str) -> None:
    said = explain(tmp_path, records=[START], output=f"Traceback\n{error}\n", status=1)
    assert said is not None
    assert "\n" not in said
    assert said.startswith("could not be audited on 2 ranks: rank 0 ended with status 1: ")
    assert error.rstrip(".") in said
    assert advice in said


def test_the_first_error_counts_not_its_consequence_on_another_rank(tmp_path: Path) -> None:
    errors = [
        {"k": "error", "type": "RuntimeError", "message": "Connection closed by peer", "at": None},
        {"k": "error", "type": "IndexError", "message": "list", "at": ["t.py", 3, "x[9]"]},
        {"k": "error", "type": "KeyError", "message": "late", "at": None, "after_cut": True},
    ]
    said = explain(tmp_path, records=[START, *errors], status=1)
    assert said is not None
    assert "IndexError: list (at t.py:3: x[9])" in said


def test_ranks_that_wait_are_told_with_the_line(tmp_path: Path) -> None:
    calls = [
        {"k": "call", "c": 0, "name": "broadcast", "at": ["t.py", 1, "dist.broadcast(w)"]},
        {"k": "done", "c": 0, "seconds": 0.1},
        {"k": "call", "c": 1, "name": "barrier", "at": ["t.py", 2, "dist.barrier()"]},
    ]
    said = explain(tmp_path, records=[START, *calls], hung="its ranks waited for 20 s")
    assert said is not None
    assert "wait in barrier (t.py:2: dist.barrier())" in said
    assert "broadcast" not in said


@pytest.mark.parametrize(
    ("warning", "address"),
    [
        ("TCP client failed to connect/validate to host 10.10.1.1:6585 - retrying", "10.10.1.1"),
        ("The IPv6 network addresses of (node0, 6585) cannot be retrieved", "node0"),
        ("The client socket has failed to connect to [head.lan]:29500 (errno: 111)", "head.lan"),
        ("timed out after 9ms while trying to connect to (10.0.0.7, 29500).", "10.0.0.7"),
        ("rank 0 starts", "ADDRESS"),
    ],
)
def test_the_address_that_a_script_insists_on_is_named(
    tmp_path: Path, warning: str, address: str
) -> None:
    call = {"k": "call", "c": 0, "name": "init_process_group", "at": None}
    said = explain(tmp_path, records=[START, call], output=warning, hung="its ranks waited")
    assert said is not None
    assert said.endswith(f"or --isolate {address}.")


@pytest.mark.parametrize(
    ("records", "words", "message"),
    [
        (
            [],
            "python -I t.py {rank}",
            "could not enter any Python process. Give the Python command",
        ),
        ([START], "python t.py {rank}", "before any torch.optim optimiser took a step"),
        ([START, {"k": "backward"}], "python t.py {rank}", "no torch.optim optimiser uses them"),
    ],
)
def test_nothing_to_check(
    tmp_path: Path, records: list[dict[str, Any]], words: str, message: str
) -> None:
    said = explain(tmp_path, records=records, words=words)
    assert said is not None
    assert message in said


def test_one_rank_alone_proves_nothing_and_two_are_fine(tmp_path: Path) -> None:
    step = {"k": "step", "o": 0}
    said = explain(tmp_path, records=[START, step], words="python t.py", steps=1)
    assert said is not None
    assert "the script trains on one rank" in said
    group = {"k": "group", "rank": 0, "world": 2}
    assert explain(tmp_path, records=[START, group, step], steps=1) is None


def test_processes_that_share_gradients_in_another_way_are_counted(tmp_path: Path) -> None:
    trained: list[dict[str, Any]] = [START, {"k": "backward"}, {"k": "step", "o": 0}]
    lines = "".join(json.dumps({"t": 0.0, **one}) + "\n" for one in trained)
    (tmp_path / "8.jsonl").write_text(lines)
    said = explain(tmp_path, records=trained, words="python t.py", steps=1)
    assert said is not None
    assert "2 of its processes train, but none joins a process group" in said


def test_torchruns_report_does_not_hide_what_the_script_said(tmp_path: Path) -> None:
    output = """error: give --thing
E1123 15:02:58.178000 28131 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
"""
    failed = {"k": "error", "type": "ChildFailedError", "message": "", "at": None}
    said = explain(tmp_path, records=[START, failed], output=output, status=1)
    assert said is not None
    assert "status 1: error: give --thing." in said
