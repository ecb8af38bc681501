"""Archives that were made to harm: each costs its own submission alone, and little time."""

import bz2
import gzip
import io
import lzma
import os
import re
import struct
import subprocess
import tarfile
import time
import tracemalloc
import zipfile

import pytest

from common.errors import UserError
from lab.grade import unpack as unpacking
from lab.grade.grade import _environment
from lab.grade.submissions import digest
from lab.grade.unpack import unpack

ZEROS = bytes(2**24)
PRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def header(name="a.py", **values):
    """Return the header of a file in a tar."""
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def bomb(kind, begin, size):
    """Return a compressed file that begins so, and goes on with as many bytes of zeros."""
    press = PRESS[kind]
    return press(begin) + press(ZEROS) * (size // len(ZEROS))


def tar_of(*headers):
    return b"".join(headers) + bytes(1024)


def zip_of(*entries):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return content.getvalue()


def forged_size():
    """A zip whose directory says that 32 MB are one byte."""
    content = bytearray(zip_of(("a.py", ZEROS * 2)))
    directory = content.rindex(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = struct.pack("<I", 1)
    return bytes(content)


def overlapping():
    """A zip in which 200 entries name the same 16 MB of zeros."""
    content = zip_of(("a.py", ZEROS))
    start = content.rindex(b"PK\x01\x02")
    end = content.rindex(b"PK\x05\x06")
    entry = content[start:end]
    entries = b"".join(entry.replace(b"a.py", b"%04d" % number) for number in range(200))
    tail = struct.pack("<HHII", 200, 200, len(entries), start)
    return content[:start] + entries + b"PK\x05\x06\0\0\0\0" + tail + b"\0\0"


def negative_size():
    """A tar whose file has fewer than no bytes."""
    block = bytearray(header())
    block[124:136] = b"\xff" * 11 + b"\0"
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return tar_of(bytes(block))


def sparse():
    """A tar whose file has a terabyte of holes."""
    info = tarfile.TarInfo("a.py")
    info.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40)}
    return tar_of(info.tobuf(tarfile.PAX_FORMAT))


LONG_NAME = header("././@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=2**30)
PAX = header("pax", type=tarfile.XHDTYPE, size=2**30)
DEEP = "/".join(["d"] * 2000) + "/a.py"
PATH_MAX = "/".join(["d" * 250] * 16) + "/" + "d" * 70 + ".py"
ATTACKS = {
    "long-name.tar.gz": (lambda: bomb("gz", LONG_NAME, 2**30), "a header of 1,073,"),
    "pax.tar.xz": (lambda: bomb("xz", PAX, 2**30), "a header of 1,073,"),
    "pax.tar.bz2": (lambda: bomb("bz2", PAX, 2**30), "a header of 1,073,"),
    "xz.tar.xz": (lambda: bomb("xz", header(size=2**36), 2**30), "leave out data"),
    "bz2.tar.bz2": (lambda: bomb("bz2", header(size=2**33), 2**28), "leave out data"),
    "large.tar.gz": (lambda: bomb("gz", header(size=2**30 + 1), 2**30 + 2**25), "Leave out data"),
    "chain.tar": (lambda: tar_of(*[header(type=b"L", size=0)] * 3000), "cannot be unpacked"),
    "negative.tar": (negative_size, "cannot be unpacked|a header of -"),
    "sparse.tar": (sparse, "1,099,511,627,776 bytes or more"),
    "links.tar": (
        lambda: tar_of(*[header(f"l{n}", type=b"2", linkname="l") for n in range(10_000)]),
        "links in an archive",
    ),
    "fifo.tar": (lambda: tar_of(header(type=tarfile.FIFOTYPE)), "neither a file nor a folder: a.p"),
    "device.tar": (lambda: tar_of(header(type=b"3", devmajor=1, devminor=9)), "neither a file"),
    "many.tar.gz": (lambda: gzip.compress(header("a") * 20_001), "20,001 files"),
    "path-max.tar": (
        lambda: tar_of(
            header("x", type=b"L", size=len(PATH_MAX)),
            PATH_MAX.encode().ljust(4096 + 512, b"\0")[: -(-len(PATH_MAX) // 512) * 512],
            header(),
        ),
        "a name of 4,0.. bytes",
    ),
    "deep.zip": (lambda: zip_of((DEEP, "")), "2001 folders deep|a name of 4,0"),
    "deeper.zip": (lambda: zip_of(("d/" * 64 + "a.py", "")), "65 folders deep"),
    "forged.zip": (forged_size, "cannot be unpacked"),
    "overlapping.zip": (overlapping, "Leave out data|cannot be unpacked"),
    "nul.zip": (
        lambda: zip_of(("aXa.py", "")).replace(b"aXa.py", b"a\0a.py"),
        "no Python|unpacked",
    ),
    "file-and-folder.zip": (lambda: zip_of(("a.py", ""), ("a.py/b.py", "")), "cannot be unpacked"),
    "garbage.tar.xz": (lambda: b"\xfd7zXZ\0" + bytes(1000), "cannot be unpacked"),
}


def refused(source, target):
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        unpack(source, target, _environment())
    assert not target.exists()
    assert time.monotonic() - began < 55  # not ended by the limit
    return str(caught.value)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_archive_that_was_made_to_harm_is_one_line(name, tmp_path):
    make, problem = ATTACKS[name]
    (tmp_path / name).write_bytes(make())
    said = refused(tmp_path / name, tmp_path / "copy")
    assert "\n" not in said
    assert re.search(problem, said), said


def test_folders_that_were_made_to_harm_are_one_line(tmp_path):
    deep = tmp_path / "deep"
    deep.mkdir()
    here = os.getcwd()
    try:
        os.chdir(deep)
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    assert "65 folders deep" in refused(deep, tmp_path / "copy")
    subprocess.run(["rm", "-rf", deep], check=True)  # pytest would not get rid of it
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes/a.py")
    assert "neither a file nor a folder: a.py" in refused(tmp_path / "pipes", tmp_path / "copy")
    assert "neither a file nor" in refused(tmp_path / "pipes/a.py", tmp_path / "copy")


def test_an_archive_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_SECONDS", 0.5)
    (tmp_path / "slow.tar.bz2").write_bytes(bomb("bz2", header(size=2**31 - 2**20), 2**31))
    said = refused(tmp_path / "slow.tar.bz2", tmp_path / "copy")
    assert said == "it cannot be unpacked within 0.5 s"


@pytest.mark.slow
def test_a_large_file_is_not_read_into_memory(tmp_path):
    """What has been unpacked is hashed in the grader's process."""
    with (tmp_path / "a.py").open("wb") as file:
        file.truncate(2**28)
    tracemalloc.start()
    found = digest(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    (tmp_path / "a.py").write_bytes(bytes(2**28 - 1) + b"1")
    assert digest(tmp_path) != found


def test_good_archives_of_all_kinds_are_unpacked(tmp_path):
    # Python would run what is compiled in place of the source beside it.
    compiled = "me/__pycache__/main.cpython-311.pyc"
    files = {"me/part2/main.py": "print(2)\n", "me/data.bin": "x" * 2**20, compiled: "no source"}
    files["me/" + "d/" * 60] = ""
    (tmp_path / "good.zip").write_bytes(zip_of(*files.items()))
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.rstrip("/"))
            info.size, info.mode = len(text), 0o400
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            archive.addfile(info, io.BytesIO(text.encode()))
    (tmp_path / "good.tar").write_bytes(content.getvalue())
    for kind, press in PRESS.items():
        (tmp_path / f"good.tar.{kind}").write_bytes(press(content.getvalue()))
    unpack(tmp_path / "good.zip", tmp_path / "folder", _environment())
    for source in [*tmp_path.glob("good.*"), tmp_path / "folder"]:
        target = tmp_path / f"from-{source.name}"
        unpack(source, target, _environment())
        assert (target / "me/part2/main.py").read_text() == "print(2)\n", source
        assert (target / "me/data.bin").stat().st_size == 2**20
        assert (target / "me/data.bin").stat().st_mode & 0o777 == 0o644
        assert (target / ("me/" + "d/" * 60)).is_dir()
        assert not (target / compiled).exists(), source
