"""``--distributed``: status and last line, signals, the token, and where the ranks listen."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from common.distributed.spawn import launch_local_ranks
from common.utils.environment import RUN_TOKEN
from tests.helpers import ROOT, run_part, start_part, wait_until


def test_a_failure_ends_with_the_message_of_the_ranks(tmp_path):
    (ended,) = run_part(
        "PartTwo",
        *("--distributed", "--world-size", 2, "--dataset", "digits", "--batch-size", 1),
        *("--output-dir", tmp_path),
        cwd=tmp_path,
        cold=True,
    )
    assert ended.status == 1, ended
    *told, last = ended.err.strip().splitlines()
    assert told, ended.err
    assert all("--batch-size: got 1 for 2 ranks" in line for line in told), ended.err
    assert re.fullmatch(
        r"rank [01] failed first: it ended with status 1; its message is above", last
    )


def test_a_message_is_written_at_once(tmp_path):
    """Under ``-u``, as the ranks run: otherwise their lines run into each other."""
    packets, end = os.pipe2(os.O_DIRECT)  # a read gets what one write has written
    words = [sys.executable, "-u", ROOT / "PartOne/main.py", "--dataset", "digits"]
    with open(packets, "rb", buffering=0) as read, open(end, "wb") as stderr:
        ended = subprocess.run(
            [*words, "--batch-size", "1", "--output-dir", tmp_path],
            stderr=stderr,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        assert re.fullmatch(rb"error: --batch-size[^\n]+\n", read.read(4096))


STOPS = """
import os, pathlib, signal, sys
def end(number, frame): sys.exit(int(sys.argv[2]) if sys.argv[2] != "-" else 128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, end)
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "rank_status", "status"),
    [
        (signal.SIGTERM, "75", 75),
        (signal.SIGUSR1, "75", 75),
        (signal.SIGTERM, "-", 143),
        (signal.SIGINT, "-", 130),
    ],
)
def test_a_signal_is_passed_on_and_the_ranks_are_awaited(tmp_path, number, rank_status, status):
    code = (
        "import os, sys\n"
        "from common.distributed.spawn import launch_local_ranks\n"
        f"command = ['-c', {STOPS!r}, {str(tmp_path)!r}, {rank_status!r}]\n"
        "sys.exit(launch_local_ranks(command, [{'RANK': '0'}, {'RANK': '1'}], os.environ))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"0", "1"}, "two ranks")
        launcher.send_signal(number)
        assert launcher.wait(30) == status
    finally:
        launcher.kill()
        launcher.wait(10)


def test_the_ranks_share_a_new_token_in_each_run_or_the_users(tmp_path):
    write = (
        "import os, pathlib, sys\n"
        "name = os.environ['RANK']\n"
        f"pathlib.Path(sys.argv[1], name).write_text(os.environ[{RUN_TOKEN!r}])"
    )
    ranks, found = [{"RANK": "0"}, {"RANK": "1"}], []
    own = {name: value for name, value in os.environ.items() if name != RUN_TOKEN}
    for environment in (own, own, {**own, RUN_TOKEN: "mine"}):
        assert launch_local_ranks(["-c", write, str(tmp_path)], ranks, environment) == 0
        [token] = {(tmp_path / rank).read_text() for rank in "01"}
        found.append(token)
    assert found[2] == "mine"
    assert found[0] != found[1]
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in found[:2])


@pytest.mark.slow
def test_local_ranks_listen_on_loopback_only(tmp_path):
    """Their store and Gloo; and neither command line nor files have the token."""
    started = start_part(
        "PartTwo",
        *("--distributed", "--world-size", 2, "--dataset", "digits", "--batch-size", 16),
        *("--max-steps", 500, "--log-every", 1, "--threads", 1, "--output-dir", tmp_path),
        cwd=tmp_path,
        env={RUN_TOKEN: "the-token-of-this-run"},
        cold=True,
    )
    started.wait_for("writing to")  # the group is open
    processes = psutil.Process(started.process.pid).children(recursive=True)
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    commands = [" ".join(process.cmdline()) for process in processes]
    started.process.send_signal(signal.SIGTERM)
    ended = started.end()
    assert ended.status in (75, 128 + signal.SIGTERM), ended
    assert len(listening) >= 3, "the store, and Gloo of each rank"
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    assert "the-token" not in " ".join(commands) + ended.out + ended.err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"the-token" not in path.read_bytes(), path
