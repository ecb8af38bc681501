"""Commands whose results find no room: one message, and a second call goes on."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT, user_environment
from tests.helpers.full_disk import on_small_disk, why_no_small_disk

pytestmark = pytest.mark.skipif(
    bool(why_no_small_disk()), reason="this user can mount no disk in a namespace"
)


def run_where_out_is_full(folder, *words, free_kb, limit_seconds):
    """Run a command of lab with a disk of 4 MB as the folder out, of which little is free."""
    (folder / "out").mkdir()
    filler = f'head -c {4096 - free_kb}k /dev/zero > out/filler && exec "$@"'
    return subprocess.run(
        [
            *(*on_small_disk("4m"), "bash", "-c", filler, "bash"),
            *(sys.executable, "-P", "-m", "lab", *map(str, words)),
        ],
        **{"cwd": folder, "capture_output": True, "text": True, "timeout": limit_seconds},
        env=user_environment(TMPDIR=str(folder / "out"), PYTHONPATH=str(ROOT)),
    )


def assert_told_once(ended, pattern):
    """Assert that the command ends with one error that says where room is missing."""
    errors = re.findall("^error: .*", ended.stderr, re.MULTILINE)
    assert len(errors) == 1, ended.stderr
    assert re.search(pattern, errors[0]), errors[0]
    assert "Traceback" not in ended.stderr + ended.stdout


def test_an_audit_needs_room_for_its_records(tmp_path):
    words = ["audit", "--", "python", "main.py"]
    ended = run_where_out_is_full(tmp_path, *words, free_kb=300, limit_seconds=60)
    assert ended.returncode == 2
    assert_told_once(ended, r"/out has \d+ kB free, .*TMPDIR")
