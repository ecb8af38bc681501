"""Why a script could not be audited: the script's own error and what to try, on one line."""

import json
import re

import pytest

from lab.audit.command import parse_command
from lab.audit.failures import explain_failure
from lab.audit.recording import RecordReader
from lab.audit.runner import AuditRun, RunSettings
from tests.lab.audit.recordings import probe_fields

# The name of a known error, and a part of the advice.
WEIGHTS = ("weights_only", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1")
INTERFACE = ("gloo_interface", "--isolate ens3")
HOST = ("own_host_name", "--isolate node-7")
ADDRESS = ("foreign_address", "--isolate ADDRESS")
TORCHRUN = ("no_environment", "torchrun --nproc-per-node 2")
SCHEME = ("address_without_scheme", "tcp://{master}:{port}")
FIXED = ("group_size_fixed", "that number with --ranks")
START = {"k": "start", "ppid": 1, "hint": 0, "variables": {}}


def explain(folder, *processes, output="", status=0, words="python t.py --rank {rank}", hung=None):
    """Return the failure of a run with these records; None if nothing went wrong.

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
    return explain_failure(run)


@pytest.mark.parametrize(
    ("error", "known", "advice"),
    [
        ("_pickle.UnpicklingError: pickle data was truncated", "broken_file", "on a single rank"),
        ("EOFError: Ran out of input", "broken_file", "let rank 0 write the file"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can still be", *WEIGHTS),
        ("AssertionError", "assertion", "--ranks 3"),
        ("RuntimeError: ifa != nullptr. Unable to find address for: ens3", *INTERFACE),
        ("RuntimeError: rp != nullptr. Unable to find address for: node-7", *HOST),
        ("OSError: [Errno 99] Cannot assign requested address", *ADDRESS),
        ("OSError: [Errno 101] Network is unreachable", *ADDRESS),
        ("socket.gaierror: [Errno -2] Name or service not known", "name_lookup", "--isolate NAME"),
        ("urllib.error.URLError: <urlopen error [Errno 111]>", "download_failed", "Put the data"),
        ("ValueError: environment variable RANK expected, but not set", *TORCHRUN),
        ("KeyError: 'LOCAL_RANK'", *TORCHRUN),
        ("RuntimeError: No rendezvous handler for ://", *SCHEME),
        ("t.py: error: unrecognized arguments: --rank", "wrong_flags", "{nodes} and {rank} are"),
        ("RuntimeError: Dataset not found or corrupted.", "dataset_not_found", "cd to the folder"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a/x'", "file_missing", "cd to"),
        ("RuntimeError: errno: 98 - Address already in use", "port_in_use", "give {port}"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no_gpu", "that has a GPU"),
        ("ValueError: the new group's world size should be less or equal", *FIXED),
        ("FrobError: seven", None, "First run the command without lab audit."),
    ],
)
def test_the_scripts_own_error_and_what_to_try(tmp_path, error, known, advice):
    failure = explain(tmp_path, [START], output=f"Traceback\n{error}\n", status=1)
    assert failure.how == "could not be run on 2 ranks"
    assert failure.reason == f"rank 0 ended with status 1: {error.rstrip('.')}."
    assert failure.known_error == known
    assert advice in failure.advice
    # what an author of the script reads says nothing about the audit's own flags
    assert not re.search(r"--isolate|--ranks|\{master\}|lab audit", failure.cause + failure.cure)
    for words in (failure.how, failure.reason, failure.cause, failure.advice):
        assert words in failure.text


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("einops.layers", "python has no package einops: install it there"),
        ("einx_not_there", "python has no package einx_not_there: install it there"),
        ("torchvison", "Did you mean torchvision?"),
        ("benchmrks", "Did you mean benchmarks?"),
        ("prefixed_output", "prefixed_output is in lab/fleet: cd to that folder"),
    ],
)
def test_a_missing_module_is_misspelt_or_elsewhere_or_not_installed(tmp_path, module, advice):
    error = f"ModuleNotFoundError: No module named '{module}'"
    failure = explain(tmp_path, [START], output=f"Traceback\n{error}\n", status=1)
    assert failure.known_error == "missing_package"
    assert advice in failure.advice


@pytest.mark.parametrize(
    ("printed", "place", "known"),
    [
        ('  File "{folder}/t.py", line 2\n    n = 20t\nSyntaxError: invalid', 2, "syntax_error"),
        ('  File "{folder}/t.py", line 2\n    print "a"\nTabError: mixed', 2, "syntax_error"),
        (
            '  File "{folder}/t.py", line 1, in <module>\n    open("out/x", "w")\n'
            "FileNotFoundError: [Errno 2] No such file or directory: 'out/x'",
            1,
            "output_folder_missing",
        ),
        (
            '  File "{folder}/t.py", line 3, in f\n    os.environ["RANK"]\n'
            "  File \"<frozen os>\", line 679, in __getitem__\nKeyError: 'RANK'",
            3,
            "no_environment",
        ),
        (
            '  File "{folder}/t.py", line 1, in <module>\n    import json\n'
            '  File "{folder}/env/lib/python3.11/json/__init__.py", line 9, in x\n    boom()\n'
            "ValueError: boom",
            1,
            None,
        ),
    ],
)
def test_a_printed_traceback_gives_the_line_of_the_script(tmp_path, printed, place, known):
    """Where the probe has no line: before torch is imported, or where Python cannot read a file."""
    folder = tmp_path / "student"
    folder.mkdir()
    (folder / "t.py").touch()
    failure = explain(
        tmp_path,
        [START],
        output="Traceback (most recent call last):\n" + printed.format(folder=folder) + "\n",
        status=1,
        words=f"python {folder}/t.py --rank {{rank}}",
    )
    assert (failure.at.file, failure.at.line) == ("t.py", place)
    assert f"(at {failure.at})" in failure.reason
    assert failure.known_error == known
    if known == "output_folder_missing":
        assert "mkdir -p out;" in failure.advice


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("reading the data", "rank 0 ended with status 1, and last printed: reading the data."),
        ("error: no data", "rank 0 ended with status 1: error: no data."),
        ("", "rank 0 ended with status 1: it printed nothing."),
    ],
)
def test_an_exit_without_a_message_is_told_as_one(tmp_path, printed, reason):
    failure = explain(tmp_path, [START], output=f"{printed}\n", status=1)
    assert (failure.reason, failure.known_error) == (reason, None)


def test_an_error_without_text_or_with_an_empty_first_line(tmp_path):
    bare = ERRORS[1] | {"type": "AssertionError", "message": ""}
    failure = explain(tmp_path, [START, bare], status=1)
    assert failure.reason == "AssertionError (at t.py:3: x[9])."
    assert failure.known_error == "assertion"
    start = "\n        An attempt has been made to start a new process before the\n    current"
    guard = ERRORS[1] | {"type": "RuntimeError", "message": start}
    failure = explain(tmp_path, [START, guard], status=1)
    assert failure.reason.startswith("RuntimeError: An attempt has been made")
    assert failure.known_error == "spawn_guard"


def test_a_message_counts_and_not_what_was_printed_long_before(tmp_path):
    """A script may go on without a package: its last error has to explain itself."""
    printed = "No module named 'apex', going on without\n"
    error = ERRORS[1] | {"message": "\x1b[1mlist\x1b[0m index out of range"}
    failure = explain(tmp_path, [START, error], output=printed, status=1)
    assert failure.reason == "IndexError: list index out of range (at t.py:3: x[9])."
    assert (failure.known_error, failure.advice) == (None, "")


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
        ([[*HALF, END]], {}, "ended after 3 steps"),
        ([[*HALF, STEP, END]], {}, ""),
        ([[*HALF, STEP, LEFT]], {}, ""),  # so ends a forked process as well
        ([[*HALF, STEP, LEFT]], {"hung": "x"}, "rank 0 is gone after 4 steps: it left with"),
        ([[*HALF, STANDS]], {"hung": "no progress"}, "no progress. Check that every rank"),
        ([[*HALF, STANDS, STEP]], {"hung": "x"}, "rank 0 is gone after 4 steps"),
        (
            [[START, *CALLS]],
            {"hung": "x"},
            "x. The ranks wait in barrier (t.py:2: dist.barrier()).",
        ),
        ([HALF], {}, "rank 0 is gone after 3 steps: it left with"),
        ([HALF], {"words": "torchrun t.py"}, "gone after 3 steps: it was stopped or"),
        # The first error counts, not its consequence on another rank.
        ([[START, *ERRORS]], {"status": 1}, "IndexError: list (at t.py:3: x[9])"),
        # The rank that left is named, not the one that waited for it.
        ([[START, GROUP, CLOSED], OTHER], {"status": 1}, "rank 1 is gone after 1 step"),
        (
            [[START, CHILD_FAILED]],
            {"status": 1, "output": TORCHRUNS_REPORT},
            "status 1: error: give --thing.",
        ),
        *(
            ([[START, JOINS]], {"output": text, "hung": "x"}, f"or --isolate {address}.")
            for text, address in INSISTS.items()
        ),
        ([[START], [START, JOINS | {"world": 2}]], {"hung": "x"}, "only 1 of the 2 ranks"),
        ([[START, JOINS | {"world": 2}]] * 2, {"hung": "x"}, "or --isolate ADDRESS"),
    ],
)
def test_what_the_records_tell(tmp_path, processes, how, message):
    failure = explain(tmp_path, *processes, **how)
    if message:
        assert message in failure.text
    else:
        assert failure is None
