"""``lab explain`` on the output of real failures (tests/lab/explain/logs) and successful runs."""

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from lab.cli import main
from lab.explain.diagnosis import KINDS, OWN, LogLine, explain, known_errors, read_lines
from lab.explain.output import main_explain
from tests.helpers import ROOT

LOGS = Path(__file__).with_name("logs")

# The errors in each log, most likely cause first; notes are left out, since they are no errors.
EXPECTED = {
    "connect_full_mesh": ["connect_full_mesh"],
    "cuda_out_of_memory": ["cuda_out_of_memory"],
    "ddp_other_model": ["mismatched_parameters", "peer_gone"],
    "disk_full": ["disk_full"],
    "disk_full_torch_save": ["disk_full"],
    "duplicate_gpu": ["duplicate_gpu"],
    "duplicate_gpu_nccl_2_30": ["duplicate_gpu"],
    "exception_one_rank": [OWN, "peer_gone"],
    "gloo_interface": ["gloo_interface"],
    "good_loopback_fallback": [],
    "good_partone": [],
    "good_parttwo": [],
    "good_torchrun": [],
    "host_name_is_loopback": ["host_name_is_loopback"],
    "lab_dataset_missing": ["dataset_missing"],
    "lab_different_collectives": ["mismatched_collectives"],
    "lab_gpu_shared": ["duplicate_gpu"],
    "lab_missing": ["missing_clients"],
    "lab_no_environment": ["missing_package"],
    "lab_message_refused": ["message_refused"],
    "lab_nccl_lost_rank": ["stalled_rank", "nccl_timeout"],
    "lab_no_gpu": ["nccl_no_gpu"],
    "lab_not_finite": ["not_finite"],
    "lab_port": ["port_in_use"],
    "lab_rank0_elsewhere": ["rank0_elsewhere"],
    "lab_rank_ended": ["peer_gone"],
    "lab_rank_killed": ["peer_gone"],
    "lab_rank_stands_still": ["stalled_rank"],
    "lab_settings_differ": ["settings_differ"],
    "lab_started_twice": ["started_twice"],
    "lab_token_refused": ["token_refused"],
    "lab_unreachable": ["store_no_master"],
    "loader_killed": ["killed", "loader_worker"],
    "mismatched_collectives": ["mismatched_collectives"],
    "mismatched_shapes": ["mismatched_shapes", "peer_gone"],
    "mismatched_shapes_broadcast": ["mismatched_shapes"],
    "missing_clients": ["missing_clients"],
    "missing_package": ["missing_package"],
    "monitored_barrier": ["monitored_barrier"],
    "nccl_no_gpu": ["nccl_no_gpu"],
    "nccl_system_error": ["nccl_system"],
    "nccl_timeout": ["nccl_timeout"],
    "no_environment": ["no_environment"],
    "no_group": ["not_initialized"],
    "no_route": ["no_route"],
    "out_of_memory_one_rank": ["out_of_memory", "peer_gone"],
    "port_forbidden": ["port_forbidden"],
    "port_in_use": ["port_in_use"],
    "rank_killed_gloo": ["peer_gone"],
    "shared_memory": ["shared_memory"],
    "slurm_cancelled": ["slurm_cancelled"],
    "slurm_node_failure": ["slurm_node_failure"],
    "slurm_out_of_memory": ["slurm_out_of_memory"],
    "slurm_preempted": ["slurm_preempted"],
    "slurm_time_limit": ["slurm_time_limit"],
    "store_gone": ["store_gone"],
    "store_gone_while_joining": ["store_gone"],
    "store_no_master": ["store_no_master"],
    "timeout_all_reduce": ["collective_timeout", "peer_gone"],
    "timeout_gather": ["collective_timeout"],
    "too_many_files": ["too_many_files"],
    "torchrun_exception": [OWN, "peer_gone"],
    "torchrun_killed": ["killed", "peer_gone"],
    "torchrun_missing_node": ["missing_clients"],
    "torchrun_stale_addresses": ["killed", "stale_addresses"],
    "torchrun_wrong_service": ["wrong_service"],
    "torchvision_pair": ["torchvision_pair"],
    "unknown_host": ["unknown_host"],
    "unused_parameters": ["unused_parameters"],
    "wrong_interface": ["wrong_interface"],
}


def errors_of(*logs):
    """Return the names of the errors in these logs, read as one log; leave out notes."""
    lines = [line for log in logs for line in read_lines(str(LOGS / f"{log}.txt"))]
    return [one.error.name for one in explain(lines) if one.error.kind != "note"]


def lines_of(text):
    return [
        LogLine("", number, line) for number, line in enumerate(text.splitlines(), start=1) if line
    ]


def test_every_log_is_expected_and_every_error_has_one():
    assert {path.stem for path in LOGS.glob("*.txt")} == set(EXPECTED)
    shown = {
        one.error.name for path in LOGS.glob("*.txt") for one in explain(read_lines(str(path)))
    }
    assert {error.name for error in known_errors()} <= shown


@pytest.mark.parametrize("log", EXPECTED)
def test_a_log_is_told_as_what_it_is(log):
    assert errors_of(log) == EXPECTED[log]


@pytest.mark.parametrize("log", [log for log, names in EXPECTED.items() if names])
def test_the_line_that_is_named_shows_the_error(log):
    path = LOGS / f"{log}.txt"
    first = explain(read_lines(str(path)))[0]
    text = path.read_text().split("\n")[first.line.number - 1]
    assert text == first.line.text
    assert first.error.name == OWN or any(
        re.search(pattern, text) for pattern in first.error.patterns
    )


def test_the_order_of_ranks_does_not_matter():
    """The first failure comes first, wherever its output appears."""
    text = (LOGS / "exception_one_rank.txt").read_text()
    rank0, rank1 = text.split("--- rank 1\n")
    for one, other in ((rank0, rank1), (rank1, rank0)):
        found = explain(lines_of(one + other))
        assert [entry.error.name for entry in found] == [OWN, "peer_gone"]
        assert found[0].line.text.endswith("ValueError: could not read the image cat/000.png")


def test_several_files_are_read_as_one(capsys, tmp_path):
    """The survivor's log shows only a consequence; the other rank's log adds the cause."""
    rank0, rank1 = (LOGS / "exception_one_rank.txt").read_text().split("--- rank 1\n")
    for number, text in enumerate((rank0, rank1)):
        (tmp_path / f"rank{number}.txt").write_text(text)

    logs = [str(tmp_path / f"rank{number}.txt") for number in (0, 1)]
    assert main_explain(Namespace(logs=logs[:1])) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("1. another rank has ended")
    assert "These are echoes" in alone
    assert main_explain(Namespace(logs=logs)) == 0
    both = capsys.readouterr().out
    assert re.match(
        rf"1\. an exception of the program itself\n   {tmp_path}/rank1\.txt:\d+: .*ValueError: "
        r"could not read",
        both,
    )
    assert "echoes" not in both


def test_prefixes_and_colours_of_launchers_don_t_hide_an_error():
    line = "RuntimeError: [pair.cc:561] Connection closed by peer [10.0.0.2]:4493"
    for prefix in ("", "[rank1]: ", "node 2| ", "3: ", "\x1b[31m"):
        found = explain(lines_of(f"{prefix}{line}"))
        assert [one.error.name for one in found] == ["peer_gone"]
    own = explain(lines_of(f"[rank0]: {line}\nnode 1| KeyError: 'lr'"))
    assert [one.error.name for one in own] == [OWN, "peer_gone"]


def test_words_about_errors_are_no_errors():
    """A successful run may mention the same things."""
    good = (
        "timeout: 60 s, port 29500\nconnected to 127.0.1.1:29500\nall ranks joined: 4 of "
        "4\nchecking for duplicate images\nProcess group has been initialized\nmemory: 3 of 40 "
        "GB used\nKilled 3 of 12 mutants\nNo errors in 1234 files"
    )
    assert explain(lines_of(good)) == []


def test_what_the_shell_and_the_kernel_say_of_a_killed_process():
    for line in (
        "train.sh: line 4:  8079 Killed        python train.py",
        "Killed",
        "[  17.3] Out of memory: Killed process 1234 (python) total-vm:9 kB",
        "srun: error: node3: task 0: Killed",
        "rank 1 was killed by SIGKILL: it said",
    ):
        assert [one.error.name for one in explain(lines_of(line))] == ["killed"], line


def test_nothing_known_says_so_and_where_to_look(tmp_path, capsys):
    (tmp_path / "log").write_text(
        'epoch 1\nTraceback (most recent call last):\n  File "x.py", line 1\nFrobError: seven\n'
    )
    assert main(["explain", str(tmp_path / "log")]) == 0
    told = capsys.readouterr().out
    assert re.match(r"No known error in 4 lines\.", told)
    assert "line 4: FrobError: seven" in told


def test_a_message_of_the_project_is_quoted(tmp_path, capsys):
    own = "error (rank 1): --batch-size: got 1 for 2 ranks; give 4 or more"
    (tmp_path / "log").write_text(f"epoch 1\n[rank1]: {own}\nmore\n")
    assert main(["explain", str(tmp_path / "log")]) == 0
    told = capsys.readouterr().out
    assert own in told
    assert "log:2" in told
    assert "No known error" not in told


def test_standard_input_an_empty_log_and_a_missing_one(tmp_path, capsys):
    told = subprocess.run(
        [sys.executable, "-m", "lab", "explain", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=(LOGS / "port_in_use.txt").read_text(),
        timeout=90,
        check=False,
    )
    assert told.returncode == 0
    assert re.match(r"1\. address already in use\n   line \d+: .*EADDRINUSE", told.stdout)
    assert "cure:  End that process" in told.stdout
    (tmp_path / "empty.txt").touch()
    assert main(["explain", str(tmp_path / "empty.txt")]) == 0
    assert "The log is empty" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "none.txt")]) == 2
    assert re.match(
        r"error: lab explain: .*none\.txt cannot be read \(No such file or directory\)",
        capsys.readouterr().err,
    )


def test_the_table_is_whole_and_stands_in_the_docs():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    names = [error.name for error in known_errors()]
    for error in known_errors():
        assert error.kind in KINDS
        assert set(error.hides) <= set(names), error.name
        assert f"| {error.title} | {error.cause} | {error.cure} |" in text, (
            f"{error.name} is not in docs/troubleshooting.md"
        )


@pytest.mark.parametrize(
    "words",
    [
        "is taken on this machine",
        "could not reach rank 0 at",
        "ranks came to",
        "was started twice",
        "is not an address of this machine (it has ",
        "the ranks differ in",
        "was started with --num-nodes",
        "broke: another rank has ended",
        "ended or was killed at",
        "has not moved since",
        ", this one, stood still for",
        "the ranks did not call the same collective",
        "not finite in epoch",
        "Start every rank with the same version of this project",
        "has a run token and",
        "is not rank 0's: set the same value on every node",
        "as torchrun sets them, but no",
        "this machine has no interface",
        "and could not be downloaded",
        "could not be written (",
        "something other than rank 0 answers",
        "lost rank 0 at",
        "is not an address and no known host name",
    ],
)
def test_the_parts_still_say_what_is_looked_for(words):
    """If a message of this project changes, its pattern must change too."""
    source = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    assert words in re.sub(r'"\s*\n\s*f?"', "", source)
    assert any(
        words in pattern.replace("\\", "") for error in known_errors() for pattern in error.patterns
    )
