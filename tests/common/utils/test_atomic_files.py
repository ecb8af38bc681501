"""Files are written whole or not at all, through links, and never over anything but a file."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from common.utils.atomic_files import (
    append_text,
    check_folder,
    read_regular,
    regular_target,
    whole_lines,
    write_atomically,
)

KINDS = ["FIFO", "socket", "device", "folder"]
ACTIONS: dict[str, Callable[[Path], object]] = {
    "read": read_regular,
    "lines": whole_lines,
    "write": lambda path: write_atomically(path, b"new"),
    "append": lambda path: append_text(path, "new", name=str(path)),
    "check": regular_target,
}


@pytest.fixture
def special(tmp_path):
    """Return a function that makes a node of a kind below the test's own folder."""
    sockets = []

    def make(kind):
        path = tmp_path / "node"
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            sockets.append(socket.socket(socket.AF_UNIX))
            os.chdir(tmp_path)  # a socket's path has at most 107 characters
            sockets[0].bind("node")
        elif kind == "folder":
            path.mkdir()
        elif os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # what /dev/null is
        else:
            pytest.skip("only root can make a device")
        return path

    here = Path.cwd()
    yield make
    os.chdir(here)
    for one in sockets:
        one.close()


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_and_stays(special, tmp_path, kind, linked):
    """Nothing blocks, also not on a FIFO without a reader or writer."""
    node = path = special(kind)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(node)
    before = node.lstat()
    for name, action in ACTIONS.items():
        with pytest.raises(UserError, match=rf"{path} is a {kind}, not a regular file") as error:
            action(path)
        assert "\n" not in str(error.value), name
    after = node.lstat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (
        before.st_mode,
        before.st_ino,
        before.st_rdev,
    )
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_link_stays_and_its_target_is_written(tmp_path):
    """A chain of links, relative ones too; the unfinished file is on the target's disk."""
    (tmp_path / "store").mkdir()
    target, link, chain = tmp_path / "store" / "file", tmp_path / "link", tmp_path / "chain"
    target.write_text("old")
    link.symlink_to("store/file")
    chain.symlink_to("link")
    write_atomically(chain, b"new\n")
    append_text(chain, "more\n", name="the log", sync=True)
    assert (link.readlink(), chain.readlink()) == (Path("store/file"), Path("link"))
    assert target.read_text() == "new\nmore\n"
    assert read_regular(chain) == b"new\nmore\n"
    assert regular_target(chain) == target


def test_a_link_to_a_missing_file_makes_it(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("missing")
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "missing").read_bytes() == b"new"


def test_a_loop_of_links_is_refused(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for name in ("write", "append", "read"):
        with pytest.raises(UserError, match=r"loop .*Too many levels of symbolic links"):
            ACTIONS[name](loop)


def test_lines_without_one_that_is_not_whole(tmp_path):
    path = tmp_path / "lines"
    for content, lines in {b"": [], b"a": [], b"a\n": [b"a\n"], b"a\nb": [b"a\n"]}.items():
        path.write_bytes(content)
        assert whole_lines(path) == lines


def test_a_folder_or_nothing(special, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "link", tmp_path / "missing"):
        check_folder(path)
    with pytest.raises(UserError, match="is not a folder"):
        check_folder(special("FIFO"))


def test_what_is_appended_with_sync_is_synced_with_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}"))
    )
    append_text(tmp_path / "log", "line\n", name="the log")
    assert synced == []
    append_text(tmp_path / "log", "", name="the log", sync=True)
    assert synced == [str(tmp_path / "log"), str(tmp_path)]
