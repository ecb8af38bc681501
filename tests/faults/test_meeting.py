"""Ranks that fail to join: every rank concerned prints one message with rank and cause."""

import shutil
import socket
import sys

import pytest

from tests.helpers import (
    ROOT,
    Started,
    free_port,
    only_run_folder,
    start_part,
    start_ranks,
    user_environment,
)
from tests.helpers.stage import PACED, QUICK, assert_told, set_pace


def start_rank(rank, size, port, *arguments, cwd, host="127.0.0.1"):
    place = ("-M", host, "--master-port", port, "-N", size, "-R", rank, "--threads", 1)
    return start_part("PartTwo", *QUICK, *place, *arguments, cwd=cwd)


def told_to_all(tmp_path, *ranks, told, limit=40):
    """Start ranks with their --num-nodes; only a missing one is waited for until the limit."""
    port, flags = free_port(), ("--meeting-timeout", limit, "--output-dir", tmp_path)
    for rank in [start_rank(*one, port, *flags, cwd=tmp_path) for one in ranks]:
        ended = rank.end()
        assert_told(ended, told)
        assert limit < 40 or ended.seconds < 35, "they waited for the timeout"


def test_a_rank_that_never_comes_is_named_by_all_that_came(tmp_path):
    told = r"2 of 4 ranks came to 127\.0\.0\.1:\d+ within 5 s; missing: ranks 1 and 3\. "
    told += "Start them .*, or give a longer --meeting-timeout"
    told_to_all(tmp_path, (0, 4), (2, 4), told=told, limit=5)


def test_a_rank_started_twice_is_told_to_all(tmp_path):
    told = r"rank 1 was started twice: on .* \(process \d+\) and on .* \(process \d+\)"
    told_to_all(tmp_path, (0, 3), (1, 3), (1, 3), told=told)


def test_other_number_of_nodes(tmp_path):
    told = r"rank 1 was started with --num-nodes 3, but rank 0 with 2"
    told_to_all(tmp_path, (0, 2), (1, 3), told=told)


def test_settings_that_differ_are_named_with_both_values(tmp_path):
    port, flags = free_port(), ("--output-dir", tmp_path, "--lr")
    ranks = [start_rank(rank, 2, port, *flags, (rank + 1) / 10, cwd=tmp_path) for rank in (0, 1)]
    differ = r"differ in their settings\. --learning-rate: 0\.1 on rank 0, 0\.2 on rank 1"
    for rank in ranks:
        assert_told(rank.end(), differ)


def test_a_taken_port_says_which_one_to_use(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = start_rank(0, 2, port, cwd=tmp_path).end()
    taken = rf"port {port} is taken on this machine.*add --master-port \d+ on every rank"
    assert_told(ended, taken)


def test_an_unreachable_master_says_why(tmp_path):
    port = free_port()
    alone = start_rank(1, 2, port, "--meeting-timeout", 2, cwd=tmp_path)
    # a launcher, which makes a token, starts all ranks at once
    launched = start_rank(1, 2, port, "--timeout", 2, "--run-token", "secret", cwd=tmp_path)
    named = start_rank(1, 2, port, "--timeout", 60, cwd=tmp_path, host="no-such-host.invalid")
    told = rf"could not reach rank 0 at 127\.0\.0\.1:{port} within 2 s \(connection refused\)"
    for rank in (alone, launched):
        assert_told(rank.end(), told)
    assert_told(named.end(), r"--master-ip no-such-host\.invalid is not an address")


def test_other_code_on_one_node_is_named_with_the_file(stage):
    """Settings, parameters and messages agree; the line would silently change the mean gradient."""
    other = stage.folder / "other"
    for name in ("common", "PartTwo", "recipes"):
        shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / "common" / "sync" / "all_reduce.py"
    text = changed.read_text()
    changed.write_text(text.replace("dist.get_world_size()", "(dist.get_world_size() + 1)"))
    assert changed.read_text() != text
    stage.start(nodes=[0, 1])
    stage.start(nodes=[2], root=other, port=stage.port)
    told = (
        r"the ranks differ in their code\. common/sync/all_reduce\.py: \w{12} on ranks 0 and "
        r"1, \w{12} on rank 2\. Start every rank with the same"
    )
    for ended in stage.end().values():
        assert_told(ended, told)
    assert not stage.run().exists()


@pytest.mark.slow
def test_a_second_cluster_on_one_port_is_refused_and_the_first_goes_on(tmp_path):
    port, length = free_port(), ("--max-steps", 40, "--timeout", 30)
    place = ("-M", "127.0.0.1", "-N", 2, "--master-port", port, "--output-dir", tmp_path / "first")
    command = [sys.executable, *map(str, (*PACED, *QUICK, *length, *place)), "--rank"]
    how = {"cwd": tmp_path, "env": user_environment(**set_pace(tmp_path, 2)), "forked": True}
    first = [Started([*command, str(rank)], **how) for rank in range(2)]
    first[0].wait_for("step 2/")
    flags = (*QUICK, *length, "--seed", 1, "--output-dir", tmp_path / "second")
    second = start_ranks("PartTwo", 2, *flags, cwd=tmp_path, port=port)
    root, other = (rank.end(timeout_seconds=90) for rank in second)
    assert_told(root, rf"port {port} is taken on this machine, by another run")
    assert_told(other, r"rank 1 was started twice: on .* \(process \d+\) and on")
    assert not (tmp_path / "second").exists()
    set_pace(tmp_path, 0)
    assert [rank.end(timeout_seconds=90).status for rank in first] == [0, 0]
    folder = only_run_folder(tmp_path / "first", "PartTwo-gather_scatter")
    assert (folder / "metrics.jsonl").read_text().count("\n") == 40
