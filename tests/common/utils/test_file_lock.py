"""Locks between processes: of a file for the lock alone, and of an open file."""

import errno
import fcntl
import subprocess
import sys

import pytest

from common.utils.file_lock import lock_file, lock_open_file


def test_a_lock_file_is_held_until_its_release(tmp_path):
    """Another lock on it, as of another process, waits no longer than it was told to."""
    path = tmp_path / ".lock"
    first = lock_file(path, wait_seconds=0, name=tmp_path, advice="")
    for seconds in (0, 0.2):
        with pytest.raises(TimeoutError):
            lock_file(path, wait_seconds=seconds, name=tmp_path, advice="")
    first.release()
    lock_file(path, wait_seconds=0, name=tmp_path, advice="").release()


def test_without_locks_the_user_is_warned(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock_file(tmp_path / ".lock", wait_seconds=0, name="the folder", advice="take care").release()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == ("warning: the folder cannot be locked (Function not implemented): take care")
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="not implemented"):
        lock_open_file(file)


def test_an_open_file_has_one_writer_or_several_readers(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as writer:
        assert lock_open_file(writer)
        with path.open("rb") as reader:
            assert not lock_open_file(reader, shared=True)
    with path.open("rb") as one, path.open("rb") as two, path.open("ab") as writer:
        assert lock_open_file(one, shared=True)
        assert lock_open_file(two, shared=True)
        assert not lock_open_file(writer)


def test_a_child_that_inherits_an_open_file_holds_its_lock(tmp_path):
    """As a part does that writes its output to the log of a run."""
    path = tmp_path / "log"
    with path.open("ab") as log:
        assert lock_open_file(log)
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log
        )
    with child, path.open("rb") as reader:
        assert not lock_open_file(reader, shared=True)
        child.communicate(b"\n", timeout=60)
        assert lock_open_file(reader, shared=True)
