"""Why a script could not be audited: the script's own error and what to try, on one line."""

import json

import pytest

from lab.audit.command import parse_command
from lab.audit.failures import explain_failure
from lab.audit.recording import read_recording
from lab.audit.runner import AuditRun, RunSettings

START = {"k": "start", "ppid": 1, "hint": 0, "variables": {}}


def explain(folder, *, records, output="", status=0, words="python t.py --rank {rank}", hung=None):
    """Return the explanation of a run whose rank 0 has ended so; "" if nothing went wrong."""
    lines = [json.dumps({"t": float(number), **one}) for number, one in enumerate(records)]
    if lines:
        (folder / "7.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "rank0.log").write_text(output)
    (folder / "rank1.log").touch()
    command = parse_command(words.split(), None)
    run = AuditRun(command, 2, folder, RunSettings())
    run.statuses, run.failed, run.hung = (status, None), {0: 1.0} if status else {}, hung
    run.recording = read_recording(folder)
    return explain_failure(run) or ""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ModuleNotFoundError: No module named 'einops.layers'", "python has no einops: install"),
        ("ModuleNotFoundError: No module named 'torchvison'", "Did you mean torchvision?"),
        ("ModuleNotFoundError: No module named 'benchmrks'", "Did you mean benchmarks?"),
        ("ModuleNotFoundError: No module named 'qqq'", "does not know qqq: cd to the folder"),
        ("_pickle.UnpicklingError: pickle data was truncated", "two ranks write it at once"),
        ("EOFError: Ran out of input", "let rank 0 write the file"),
        ("AssertionError", "--ranks 3"),
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
def test_the_scripts_own_error_and_what_to_try(tmp_path, error, advice):
    said = explain(tmp_path, records=[START], output=f"Traceback\n{error}\n", status=1)
    assert "\n" not in said
    assert said.startswith("could not be run on 2 ranks: rank 0 ended with status 1: ")
    assert error.rstrip(".") in said
    assert advice in said


def test_the_first_error_counts_not_its_consequence_on_another_rank(tmp_path):
    errors = [
        {"k": "error", "type": "RuntimeError", "message": "Connection closed by peer", "at": None},
        {"k": "error", "type": "IndexError", "message": "list", "at": ["t.py", 3, "x[9]"]},
        {"k": "error", "type": "KeyError", "message": "late", "at": None, "after_cut": True},
    ]
    said = explain(tmp_path, records=[START, *errors], status=1)
    assert "IndexError: list (at t.py:3: x[9])" in said


def test_ranks_that_wait_are_told_with_the_line(tmp_path):
    calls = [
        {"k": "call", "c": 0, "name": "broadcast", "at": ["t.py", 1, "dist.broadcast(w)"]},
        {"k": "done", "c": 0, "seconds": 0.1},
        {"k": "call", "c": 1, "name": "barrier", "at": ["t.py", 2, "dist.barrier()"]},
    ]
    said = explain(tmp_path, records=[START, *calls], hung="its ranks waited for 20 s")
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
def test_the_address_that_a_script_insists_on_is_named(tmp_path, warning, address):
    call = {"k": "call", "c": 0, "name": "init_process_group", "at": None}
    said = explain(tmp_path, records=[START, call], output=warning, hung="its ranks waited")
    assert said.endswith(f"or --isolate {address}.")


GROUP, STEP = {"k": "group", "rank": 0, "world": 2}, {"k": "step", "o": 0}
END, CUT = {"k": "end", "status": None}, {"k": "cut"}
LEFT, STANDS = {"k": "end", "status": 0}, {"k": "stands", "c": None, "name": None, "at": None}
ALL, HALF = [START, GROUP, *[STEP] * 6], [START, GROUP, *[STEP] * 3]
BY_RANK = "python t.py {rank}"


@pytest.mark.parametrize(
    ("records", "words", "hung", "message"),
    [
        ([], f"python -I {BY_RANK}", None, "could not enter any Python process. Give the Python"),
        ([START], BY_RANK, None, "before any torch.optim optimiser took a step"),
        ([START, {"k": "backward"}], BY_RANK, None, "no torch.optim optimiser uses them"),
        ([START, STEP], "python t.py", None, "the script trains on one rank"),
        ([*ALL, CUT], BY_RANK, None, ""),
        ([*HALF, END], BY_RANK, None, "ended after 3 of 6 steps"),
        ([*HALF, STEP, END], BY_RANK, None, ""),
        ([*HALF, STEP, LEFT], BY_RANK, None, ""),  # so ends a forked process as well
        ([*HALF, STEP, LEFT], BY_RANK, "x", "rank 0 is gone after 4 of 6 steps: it left with"),
        ([*HALF, STANDS], BY_RANK, "no progress", "no progress. Check that every rank"),
        ([*HALF, STANDS, STEP], BY_RANK, "x", "rank 0 is gone after 4 of 6 steps"),
        (HALF, BY_RANK, None, "rank 0 is gone after 3 of 6 steps: it left with"),
        (HALF, "torchrun t.py", None, "rank 0 is gone after 3 of 6 steps: it was stopped or"),
    ],
)
def test_an_early_end_without_an_error(tmp_path, records, words, hung, message):
    said = explain(tmp_path, records=records, words=words, hung=hung)
    assert message in said if message else not said


def test_the_rank_that_left_is_named_not_the_one_that_waited_for_it(tmp_path):
    other = [START | {"hint": 1}, GROUP | {"rank": 1}, STEP]
    lines = "".join(json.dumps({"t": 0.0, **one}) + "\n" for one in other)
    (tmp_path / "8.jsonl").write_text(lines)
    waits = {"k": "error", "type": "RuntimeError", "message": "Connection closed by peer"}
    said = explain(tmp_path, records=[START, GROUP, waits], status=1)
    assert "rank 1 is gone after 1 of 6 steps" in said


def test_processes_that_share_gradients_in_another_way_are_counted(tmp_path):
    trained = [START, {"k": "backward"}, STEP]
    lines = "".join(json.dumps({"t": 0.0, **one}) + "\n" for one in trained)
    (tmp_path / "8.jsonl").write_text(lines)
    said = explain(tmp_path, records=trained, words="python t.py")
    assert "2 of its processes train, but none joins a process group" in said


def test_torchruns_report_does_not_hide_what_the_script_said(tmp_path):
    output = """error: give --thing
E1123 15:02:58.178000 28131 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
"""
    failed = {"k": "error", "type": "ChildFailedError", "message": "", "at": None}
    said = explain(tmp_path, records=[START, failed], output=output, status=1)
    assert "status 1: error: give --thing." in said
