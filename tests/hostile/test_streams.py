"""Hostile streams and nested code: what has no end, or no line end, is refused in little memory."""

import os
import subprocess
import sys

import pytest

from lab.cli import main
from lab.grade.demands import _argv_names
from tests.helpers import LONG, ROOT, user_environment

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
from lab.cli import main
sys.exit(main(sys.argv[1:]))
"""
ENDLESS = {
    "login": "#!/bin/sh\nexec cat /dev/zero\n",
    "errors": "#!/bin/sh\nexec cat /dev/zero >&2\n",
}


def in_little_memory(*words, **options):
    """Run a command of the lab that may allocate 1 GiB; return its exit status and its errors."""
    command = [sys.executable, "-c", LIMITED, *map(str, words)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONG, **options
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("ssh", ENDLESS)
def test_a_host_that_sends_without_end_is_left(tmp_path, ssh):
    fake = tmp_path / "bin/ssh"
    fake.parent.mkdir()
    fake.write_text(ENDLESS[ssh])
    fake.chmod(0o755)
    environment = user_environment()
    environment["PATH"] = f"{fake.parent}:{environment['PATH']}"
    words = ["launch", "--hosts", "a", "--logs", tmp_path / "logs", "--", "true"]
    status, errors = in_little_memory(*words, env=environment)
    assert status not in (0, -9), errors
    assert "Traceback" not in errors
    assert ("its login printed more than" in errors) == (ssh == "login"), errors


def test_a_log_without_an_end_is_refused():
    status, errors = in_little_memory("explain", "/dev/zero")
    assert (status, "Traceback" in errors) == (2, False), errors
    assert "more than 268,435,456 bytes" in errors


def test_a_log_may_come_through_a_pipe(capsys):
    """As ``lab explain <(kubectl logs ...)`` gives it."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"RuntimeError: CUDA out of memory\n")
    os.close(write_end)
    assert main(["explain", f"/dev/fd/{read_end}"]) == 0
    os.close(read_end)
    assert "memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    ["x = " + "(" * 100_000, "x = " + "-" * 5_000 + "1", "x = " + "+".join("1" * 50_000), "\0"],
)
def test_code_that_is_nested_too_deeply_names_no_arguments(code):
    assert _argv_names(code) == {}


def test_what_stands_before_deep_code_is_still_read():
    code = "import sys\nport = sys.argv[2]\n"
    assert _argv_names(code) == {2: "port"}
    assert _argv_names(code + "x = " + "-" * 900 + "1") == {2: "port"}
