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


def start_rank(rank, size, port, *arguments, cwd, part="PartTwo"):
    return start_part(
        part,
        *QUICK,
        "--master-ip",
        "127.0.0.1",
        "--master-port",
        port,
        "--num-nodes",
        size,
        "--rank",
        rank,
        "--threads",
        1,
        *arguments,
        cwd=cwd,
    )


def test_a_rank_that_never_comes_is_named_by_all_that_came(tmp_path):
    port = free_port()
    ranks = [
        start_rank(rank, 4, port, "--meeting-timeout", 5, "--output-dir", tmp_path, cwd=tmp_path)
        for rank in (0, 2)
    ]
    for rank in ranks:
        ended = rank.end()
        assert_told(
            ended, r"2 of 4 ranks came to 127\.0\.0\.1:\d+ within 5 s; missing: ranks 1 and 3"
        )


def test_a_rank_started_twice_is_told_to_all(tmp_path):
    port = free_port()
    ranks = [
        start_rank(rank, 3, port, "--meeting-timeout", 40, "--output-dir", tmp_path, cwd=tmp_path)
        for rank in (0, 1, 1)
    ]
    for rank in ranks:
        ended = rank.end()
        assert_told(
            ended, r"rank 1 was started twice: on .* \(process \d+\) and on .* \(process \d+\)"
        )
        assert ended.seconds < 35, "they waited for the timeout"


def test_other_number_of_nodes(tmp_path):
    port = free_port()
    ranks = [
        start_rank(0, 2, port, "--meeting-timeout", 40, cwd=tmp_path),
        start_rank(1, 3, port, "--meeting-timeout", 40, cwd=tmp_path),
    ]
    for rank in ranks:
        assert_told(rank.end(), r"rank 1 was started with --num-nodes 3, but rank 0 with 2")


def test_settings_that_differ_are_named_with_both_values(tmp_path):
    port = free_port()
    ranks = [
        start_rank(rank, 2, port, "--lr", rate, "--output-dir", tmp_path, cwd=tmp_path)
        for rank, rate in ((0, 0.1), (1, 0.2))
    ]
    for rank in ranks:
        assert_told(
            rank.end(),
            r"the ranks differ in their settings\. --learning-rate: 0\.1 on rank 0, "
            r"0\.2 on rank 1",
        )


def test_a_taken_port_says_which_one_to_use(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = start_rank(0, 2, port, cwd=tmp_path).end()
    assert_told(
        ended, rf"port {port} is taken on this machine.*add --master-port \d+ on every node"
    )


def test_an_unreachable_master_says_why(tmp_path):
    port = free_port()
    alone = start_rank(1, 2, port, "--meeting-timeout", 2, cwd=tmp_path)
    # a launcher, which makes a token, starts all ranks at once
    launched = start_rank(1, 2, port, "--timeout", 2, "--run-token", "secret", cwd=tmp_path)
    named = start_part(
        "PartTwo",
        *QUICK,
        "-M",
        "no-such-host.invalid",
        "-N",
        2,
        "-R",
        1,
        "--timeout",
        60,
        cwd=tmp_path,
    )
    for rank in (alone, launched):
        assert_told(
            rank.end(),
            rf"could not reach rank 0 at 127\.0\.0\.1:{port} within 2 s \(connection refused\)",
        )
    assert_told(named.end(), r"--master-ip no-such-host\.invalid is not an address")


def test_other_code_on_one_node_is_named_with_the_file(stage):
    """Ranks whose code differs are refused, even if settings, parameters and messages agree.

    One changed line would otherwise silently change the mean gradient.
    """
    other = stage.folder / "other"
    for name in ("common", "PartTwo", "recipes"):
        shutil.copytree(ROOT / name, other / name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / "common" / "sync" / "all_reduce.py"
    text = changed.read_text()
    changed.write_text(text.replace("dist.get_world_size()", "(dist.get_world_size() + 1)"))
    assert changed.read_text() != text
    stage.start(nodes=[0, 1])
    stage.start(nodes=[2], root=other, port=stage.port)
    for ended in stage.end().values():
        assert_told(
            ended,
            r"the ranks differ in their code\. common/sync/all_reduce\.py: \w{12} on ranks 0 and "
            r"1, \w{12} on rank 2\. Start every rank with the same",
        )
    assert not stage.run().exists()


@pytest.mark.slow
def test_a_second_cluster_on_one_port_is_refused_and_the_first_goes_on(tmp_path):
    port, length = free_port(), ("--max-steps", 40, "--timeout", 30)
    flags = [
        *PACED,
        *QUICK,
        *length,
        "-M",
        "127.0.0.1",
        "-N",
        2,
        "--master-port",
        port,
        "--output-dir",
        tmp_path / "first",
    ]
    environment = user_environment(**set_pace(tmp_path, 2))
    first = [
        Started(
            [sys.executable, *map(str, flags), "--rank", str(rank)],
            cwd=tmp_path,
            env=environment,
            forked=True,
        )
        for rank in range(2)
    ]
    first[0].wait_for("step 2/")
    second = start_ranks(
        "PartTwo",
        2,
        *QUICK,
        *length,
        "--seed",
        1,
        "--output-dir",
        tmp_path / "second",
        cwd=tmp_path,
        port=port,
    )
    root, other = (rank.end(timeout_seconds=90) for rank in second)
    assert_told(root, rf"port {port} is taken on this machine, by another run")
    assert_told(other, r"rank 1 was started twice: on .* \(process \d+\) and on")
    assert not (tmp_path / "second").exists()
    set_pace(tmp_path, 0)
    assert [rank.end(timeout_seconds=90).status for rank in first] == [0, 0]
    folder = only_run_folder(tmp_path / "first", "PartTwo-gather_scatter")
    assert (folder / "metrics.jsonl").read_text().count("\n") == 40
