"""Why a script could not be audited: the script's own error and what to try, on one line."""

import json

import pytest

from lab.audit.command import parse_command
from lab.audit.failures import explain_failure
from lab.audit.recording import RecordReader
from lab.audit.runner import AuditRun, RunSettings
from tests.lab.audit.recordings import probe_fields

START = {"k": "start", "ppid": 1, "hint": 0, "variables": {}}


def explain(folder, *processes, output="", status=0, words="python t.py --rank {rank}", hung=None):
    """Return the explanation of a run with these records; "" if nothing went wrong.

    output, status : what rank 0 printed, and how it ended.
    """
    for pid, records in enumerate(processes, 7):
        filled = [probe_fields(**{"t": float(number)} | one) for number, one in enumerate(records)]
        lines = [json.dumps(one) for one in filled]
        (folder / f"{pid}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "rank0.log").write_text(output)
    (folder / "rank1.log").touch()
    run = AuditRun(parse_command(words.split(), None), 2, folder, RunSettings())
    run.statuses, run.failed, run.hung = (status, None), {0: 1.0} if status else {}, hung
    run.recording = RecordReader(folder).recording()
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
        ("urllib.error.URLError: <urlopen error [Errno 111]>", "put the data where"),
        ("ValueError: environment variable RANK expected, but not set", "torchrun"),
        ("KeyError: 'LOCAL_RANK'", "torchrun"),
        ("t.py: error: unrecognized arguments: --rank", "{nodes} and {rank} are replaced"),
        ("RuntimeError: Dataset not found or corrupted.", "cd to the folder"),
        ("RuntimeError: errno: 98 - Address already in use", "give {port}"),
        ("AssertionError: Torch not compiled with CUDA enabled", "needs a GPU"),
        ("ValueError: the new group's world size should be less or equal", "number with --ranks"),
    ],
)
def test_the_scripts_own_error_and_what_to_try(tmp_path, error, advice):
    said = explain(tmp_path, [START], output=f"Traceback\n{error}\n", status=1)
    what, to_try = said.splitlines()
    assert what.startswith("could not be run on 2 ranks: rank 0 ended with status 1: ")
    assert what.endswith(f"{error.rstrip('.')}.")
    assert advice in to_try


GROUP, STEP = {"k": "group", "rank": 0, "world": 2}, {"k": "step", "o": 0}
END, CUT = {"k": "end", "status": None}, {"k": "cut"}
LEFT, STANDS = {"k": "end", "status": 0}, {"k": "stands", "c": None, "name": None, "at": None}
ALL, HALF = [START, GROUP, *[STEP] * 6], [START, GROUP, *[STEP] * 3]
OTHER = [START | {"hint": 1}, GROUP | {"rank": 1}, STEP]
TRAINED = [START, {"k": "backward"}, STEP]
CLOSED = {"k": "error", "type": "RuntimeError", "message": "Connection closed by peer", "at": None}
ERRORS = [
    CLOSED,
    {"k": "error", "type": "IndexError", "message": "list", "at": ["t.py", 3, "x[9]"]},
    {"k": "error", "type": "KeyError", "message": "late", "at": None, "after_cut": True},
]
CALLS = [
    {"k": "call", "c": 0, "name": "broadcast", "at": ["t.py", 1, "dist.broadcast(w)"]},
    {"k": "done", "c": 0, "seconds": 0.1},
    {"k": "call", "c": 1, "name": "barrier", "at": ["t.py", 2, "dist.barrier()"]},
]
CHILD_FAILED = CLOSED | {"type": "ChildFailedError", "message": ""}
TORCHRUNS_REPORT = """error: give --thing
E1123 15:02:58.178000 28131 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
"""
ONE = {"words": "python t.py"}
JOINS = {"k": "call", "c": 0, "name": "init_process_group", "at": None}
INSISTS = {  # what a script warns of that waits at an address, and the address
    "TCP client failed to connect/validate to host 10.10.1.1:6585 - retrying": "10.10.1.1",
    "The IPv6 network addresses of (node0, 6585) cannot be retrieved": "node0",
    "The client socket has failed to connect to [head.lan]:29500 (errno: 111)": "head.lan",
    "timed out after 9ms while trying to connect to (10.0.0.7, 29500).": "10.0.0.7",
    "rank 0 starts": "ADDRESS",
}


@pytest.mark.parametrize(
    ("processes", "how", "message"),
    [
        ([[]], {"words": "python -I t.py {rank}"}, "enter any Python process. Give the Python"),
        ([[START]], {}, "before any torch.optim optimiser took a step"),
        ([[START, {"k": "backward"}]], {}, "no torch.optim optimiser uses them"),
        ([[START, STEP]], ONE, "the script trains on one rank"),
        ([TRAINED, TRAINED], ONE, "2 of its processes train, but none joins a process group"),
        ([[*ALL, CUT]], {}, ""),
        ([[*HALF, END]], {}, "ended after 3 of 6 steps"),
        ([[*HALF, STEP, END]], {}, ""),
        ([[*HALF, STEP, LEFT]], {}, ""),  # so ends a forked process as well
        ([[*HALF, STEP, LEFT]], {"hung": "x"}, "rank 0 is gone after 4 of 6 steps: it left with"),
        ([[*HALF, STANDS]], {"hung": "no progress"}, "no progress. Check that every rank"),
        ([[*HALF, STANDS, STEP]], {"hung": "x"}, "rank 0 is gone after 4 of 6 steps"),
        (
            [[START, *CALLS]],
            {"hung": "x"},
            "x. The ranks wait in barrier (t.py:2: dist.barrier()).",
        ),
        ([HALF], {}, "rank 0 is gone after 3 of 6 steps: it left with"),
        ([HALF], {"words": "torchrun t.py"}, "gone after 3 of 6 steps: it was stopped or"),
        # The first error counts, not its consequence on another rank.
        ([[START, *ERRORS]], {"status": 1}, "IndexError: list (at t.py:3: x[9])"),
        # The rank that left is named, not the one that waited for it.
        ([[START, GROUP, CLOSED], OTHER], {"status": 1}, "rank 1 is gone after 1 of 6 steps"),
        (
            [[START, CHILD_FAILED]],
            {"status": 1, "output": TORCHRUNS_REPORT},
            "status 1: error: give --thing.",
        ),
        *(
            ([[START, JOINS]], {"output": text, "hung": "x"}, f"or --isolate {address}.")
            for text, address in INSISTS.items()
        ),
    ],
)
def test_what_the_records_tell(tmp_path, processes, how, message):
    said = explain(tmp_path, *processes, **how)
    assert message in said.replace("\n", "") if message else not said
