"""Datasets: digits, image folders, the real CIFAR, and its download from a server on loopback."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import http.server
import io
import os
import pickle
import shutil
import struct
import tarfile
import threading
import time
import zlib
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from common.data import DATASETS, DatasetEntry, cifar, load_dataset
from common.data.dataset import Dataset, ImageSet, pixel_statistics
from common.errors import UserError
from common.utils import progress
from lab.doctor.machine import check_dataset
from lab.proofs import ranks
from tests.helpers import (
    CIFAR,
    LONG,
    free_port,
    needs_cifar10,
    needs_cifar100,
    run_ranks,
    wait_until,
)


def _checked(dataset, train, test, classes):
    """Check what every dataset guarantees: sizes, types, shapes, labels of every class."""
    for images, size in ((dataset.train, train), (dataset.test, test)):
        assert len(images) == size
        assert (images.images.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
        assert images.images.shape == (size, 32, 32, 3)
        assert images.labels.shape == (size,)
        assert images.labels.unique().tolist() == list(range(classes))
    assert len(dataset.class_names) == classes
    assert DATASETS[dataset.name].classes in (classes, None)
    return dataset


def load_stripes(data_dir, mirror):
    """Return a dataset of the user's own, of three classes."""
    images = torch.zeros(6, 32, 32, 3, dtype=torch.uint8)
    part = ImageSet(images, torch.arange(6) % 3)
    return Dataset("stripes", part, part, ("a", "b", "c"), (0.5,) * 3, (0.2,) * 3)


def test_a_dataset_of_ones_own_is_one_entry(monkeypatch):
    monkeypatch.setitem(DATASETS, "stripes", DatasetEntry(f"{__name__}:load_stripes", 3))
    _checked(load_dataset("stripes", Path("/nonexistent")), 6, 6, 3)
    flags = Namespace(dataset="stripes", data_dir=Path("/nonexistent"))
    assert check_dataset(flags).status == "ok"


# --- digits ---


def test_digits_are_scikit_learns_each_used_once():
    """A pixel becomes 4x4 in three equal channels; the split is that of earlier versions."""
    from sklearn.datasets import load_digits

    source = load_digits()
    np.random.seed(3)
    digits = _checked(load_dataset("digits", Path("/nonexistent")), 1437, 360, 10)
    assert digits.class_names == tuple("0123456789")
    assert digits.flip is False
    shares = torch.bincount(digits.test.labels).numpy() / np.bincount(source.target)
    assert np.abs(shares * 1797 / 360 - 1).max() < 0.03
    expected = sorted(
        (np.rint(image * 255 / 16).astype(int).tolist(), int(label))
        for image, label in zip(source.images, source.target, strict=True)
    )
    found = []
    for images in (digits.train, digits.test):
        greys = images.images[:, ::4, ::4, 0]
        enlarged = greys.repeat_interleave(4, 1).repeat_interleave(4, 2)[..., None]
        assert torch.equal(images.images, enlarged.expand(-1, 32, 32, 3))
        found += zip(greys.tolist(), images.labels.tolist(), strict=True)
    assert sorted(found) == expected
    assert digits.test.labels[:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    assert (digits.mean, digits.std) == pixel_statistics(digits.train.images)


def test_pixel_statistics_by_channel():
    """Each channel has its own statistics, and a constant one causes no division by zero."""
    images = torch.zeros(3, 4, 5, 3, dtype=torch.uint8)
    images[..., 1] = 255
    images[0, ..., 2] = 100
    mean, std = pixel_statistics(images)
    assert mean == pytest.approx((0, 1, 100 / 255 / 3))
    assert std[2] == pytest.approx(float((images[..., 2].double() / 255).std(correction=0)))
    assert all(value > 0 for value in std)


# --- folder ---

COLOURS = {"blue": (10, 20, 230), "green": (5, 200, 15), "red": (250, 3, 8)}


def _picture(path, colour, *, size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def pictures(tmp_path):
    """Return a folder of images in three classes by colour, next to files that are not images."""
    for name, colour in COLOURS.items():
        for i, size in enumerate(((32, 32), (100, 40), (7, 9))):
            _picture(tmp_path / "train" / name / f"{i}.png", colour, size=size)
        _picture(tmp_path / "train" / name / "photo.JPG", colour, size=(64, 64))
        _picture(tmp_path / "train" / name / "deeper" / "x.png", colour, mode="RGBA")
        _picture(tmp_path / "test" / name / "t.jpeg", colour, size=(40, 40))
    (tmp_path / "train" / "red" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "README").write_text("no class")
    return tmp_path


def test_folder_reads_any_image(pictures):
    """Classes are sorted by name; hidden folders are none. JPEG colours are approximate."""
    dataset = _checked(load_dataset("folder", pictures), 15, 3, 3)
    assert dataset.class_names == ("blue", "green", "red")
    for images in (dataset.train, dataset.test):
        for image, label in zip(images.images, images.labels, strict=True):
            colour = torch.tensor(COLOURS[dataset.class_names[label]])
            assert int((image.int() - colour).abs().max()) <= 3
    mean = torch.tensor(list(COLOURS.values())).double().mean(dim=0) / 255
    assert dataset.mean == pytest.approx(mean.tolist(), abs=0.01)


def _read_back(picture, tmp_path, name):
    """Return an image as the dataset of a folder has it."""
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        picture.save(tmp_path / split / "a" / name)
    return load_dataset("folder", tmp_path).train.images[0]


def test_folder_scales_the_middle_square(tmp_path):
    """A wide picture keeps its middle square, upright and not squeezed; the sides are cut off."""
    wide = np.zeros((64, 192, 3), dtype=np.uint8)
    wide[:, 64:128] = (0, 255, 0)
    wide[:32, 64:128, 0] = 255
    image = _read_back(Image.fromarray(wide), tmp_path, "wide.png")
    # Scaling mixes the outermost columns with their neighbours.
    assert (image[:, 1:31, 1] == 255).all()
    assert (image[:15, 1:31, 0] == 255).all()
    assert (image[17:, :, 0] == 0).all()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "CMYK", "I;16"])
def test_folder_modes(mode, tmp_path):
    """Grey, palette, bilevel, CMYK and 16-bit pictures become the same 8-bit RGB, unclipped."""
    grey = np.tile(np.linspace(20, 235, 32).astype(np.uint8), (32, 1))
    if mode == "I;16":
        picture = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        picture = Image.fromarray(grey).convert("RGB" if mode == "CMYK" else "L").convert(mode)
    image = _read_back(picture, tmp_path, "x.tif" if mode == "CMYK" else "x.png")
    if mode == "1":
        assert set(image.unique().tolist()) <= {0, 255}
    else:
        assert int((image.int() - torch.from_numpy(grey)[..., None].int()).abs().max()) <= 8


def _png(size, *, exif=b"", pixels=bytes(32 * 97)):
    """Return a PNG whose header claims size x size pixels."""
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"eXIf", exif), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


# What is removed, what is written then (a text, an image's bytes), and the words of the message.
WRONG_FOLDERS = {
    "no train": ("train", {}, ("train", "missing")),
    "no test": ("test", {}, ("test", "missing")),
    "train is a file": ("train", {"train": b"x"}, ("train",)),
    "no classes": ("train", {"train/loose.png": b"x"}, ("train", "<class>")),
    "empty class": ("train/green", {"train/green/a.txt": b""}, ("train/green", "no image", ".png")),
    "empty test": ("test", {"test/red/notes.txt": b"x"}, ("test", "no image")),
    "unknown class": (None, {"test/violet/x.png": b"x"}, ("test", "violet")),
}
BROKEN_IMAGES = {
    "text": b"no image",
    "bomb": _png(40_000),
    "cut": _png(32)[:60],
    "too few pixels": _png(32, pixels=b"x"),
    "damaged EXIF": _png(32, exif=b"not a TIFF file"),
}
WRONG_FOLDERS |= {
    name: (None, {"train/green/broken.png": content}, ("train/green/broken.png",))
    for name, content in BROKEN_IMAGES.items()
}


@pytest.mark.parametrize("how", WRONG_FOLDERS)
def test_folder_errors(how, pictures):
    """Whatever is wrong with a folder, one line names the folder or file."""
    removed, written, (place, *words) = WRONG_FOLDERS[how]
    if removed is not None:
        shutil.rmtree(pictures / removed)
    for name, content in written.items():
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        (pictures / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_dataset("folder", pictures)
    assert all(word in str(error.value) for word in (str(pictures / place), *words)), error.value
    assert "\n" not in str(error.value)


# --- the real CIFAR ---


@pytest.mark.cifar
@pytest.mark.parametrize(
    ("name", "kind", "classes"),
    [
        pytest.param("cifar10", CIFAR10, 10, marks=needs_cifar10),
        pytest.param("cifar100", CIFAR100, 100, marks=[pytest.mark.slow, needs_cifar100]),
    ],
)
def test_cifar_is_torchvisions(name, kind, classes):
    """All labels and class names, some images, and the statistics of the training pixels."""
    dataset = _checked(load_dataset(name, CIFAR), 50_000, 10_000, classes)
    for images, is_train in ((dataset.train, True), (dataset.test, False)):
        theirs = kind(str(CIFAR), train=is_train)
        assert images.labels.tolist() == theirs.targets
        for i in (0, 1, 77, 9_999, len(images) // 2, len(images) - 1):
            picture, label = theirs[i]
            assert np.array_equal(images.images[i].numpy(), np.asarray(picture))
            assert int(images.labels[i]) == label
        assert dataset.class_names == tuple(theirs.classes)
    assert torch.bincount(dataset.train.labels).tolist() == [50_000 // classes] * classes
    mean, std = pixel_statistics(dataset.train.images)
    assert dataset.mean == pytest.approx(mean, abs=0.003)
    assert dataset.std == pytest.approx(std, abs=0.015)
    assert dataset.flip is True


# --- download ---

BASE, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
PER_BATCH = 20


class _Fake:
    """A small CIFAR-10: its archive, files, MD5 sums and a digest of its images."""

    def __init__(self):
        random_bytes, images = np.random.default_rng(0), []
        names = {"label_names": [f"class {i}" for i in range(10)]}
        self.files = {"batches.meta": pickle.dumps(names)}
        for name in BATCHES:
            data = random_bytes.integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8)
            images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels = [i % 10 for i in range(PER_BATCH)]
            self.files[name] = pickle.dumps({"data": data, "labels": labels})
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in self.files.items():
                member = tarfile.TarInfo(f"{BASE}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        self.archive = buffer.getvalue()
        contents = self.files | {ARCHIVE: self.archive}
        self.md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
        self.digest = _digest(np.concatenate(images))

    def unpack(self, data_dir, *, without=(), damaged=()):
        (data_dir / BASE).mkdir(parents=True)
        for name in self.files.keys() - set(without):
            spoilt = self.files[name][:-1] + b"?"
            (data_dir / BASE / name).write_bytes(spoilt if name in damaged else self.files[name])


def _digest(images):
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()


def _use_small_archive(md5, change):
    """Give torchvision's class the MD5 sums of the small archive; all other code stays real."""
    change(CIFAR10, "train_list", [[name, md5[name]] for name in BATCHES[:5]])
    change(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    change(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["batches.meta"]})
    change(CIFAR10, "tgz_md5", md5[ARCHIVE])
    change(CIFAR10, "url", "http://127.0.0.1:9/never-the-internet.tar.gz")


def _load(data_dir, mirror):
    """Return a digest of the loaded images, or the message of the UserError."""
    try:
        dataset = load_dataset("cifar10", data_dir, mirror=mirror)
    except UserError as error:
        return f"UserError: {error}"
    assert (len(dataset.train), len(dataset.test)) == (5 * PER_BATCH, PER_BATCH)
    assert dataset.class_names[9] == "class 9"
    return _digest(np.concatenate([dataset.train.images.numpy(), dataset.test.images.numpy()]))


def _load_as_rank(_rank, data_dir, mirror, md5):
    """Return what ``_load`` does in a process of its own."""
    os.environ |= {"no_proxy": "*", "NO_PROXY": "*"}
    _use_small_archive(md5, setattr)
    return _load(data_dir, mirror)


class _Server:
    """A mirror on loopback: it counts requests and can delay, cut or spoil its answers."""

    def __init__(self, content, *, status=200, cut=None, linger=0.0, garbage=None, length=True):
        self.paths = []
        self.began, self.go_on = threading.Event(), threading.Event()
        outer, half = self, len(content) // 2

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 30

            def do_GET(self):
                outer.paths.append(self.path)
                if garbage is not None:
                    self.wfile.write(garbage)
                    return
                self.send_response(status)
                if length:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(content[: half if cut is None else cut])
                    self.wfile.flush()
                    outer.began.set()
                    outer.go_on.wait(linger)
                    if cut is None:
                        self.wfile.write(content[half:])

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/pub"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


_fake_once = functools.cache(_Fake)


@pytest.fixture
def fake(monkeypatch):
    """Return the small archive, and make torchvision's class accept it in this process, too."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "*")
    _use_small_archive(_fake_once().md5, monkeypatch.setattr)
    return _fake_once()


@pytest.mark.parametrize("length", [True, False])
def test_download_shows_what_has_arrived(tmp_path, capsys, monkeypatch, length):
    """Off a terminal the size stands in the first line; a line follows whenever one is due."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    content = bytes(3_000_000)
    with _Server(content, length=length) as server:
        cifar.fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == content
    size, of = (" (3 MB)", " of 3") if length else ("", "")
    out = capsys.readouterr().out
    assert out.startswith(f"downloading {server.url}/file.bin{size} to {tmp_path}\n")
    assert f"\ndownload of file.bin: 1{of} MB" in out


def test_a_file_system_without_locks_is_named(fake, tmp_path, monkeypatch, capsys):
    """No lock of another kind is taken, which a killed process would leave behind."""

    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with _Server(fake.archive) as server:
        assert _load(tmp_path, server.url) == fake.digest
    assert f"{tmp_path} cannot be locked (Function not impl" in capsys.readouterr().out


def test_several_processes_download_once(fake, tmp_path):
    """The server pauses in the middle, so that a second download would show."""
    folder = tmp_path / "new" / "data"
    with _Server(fake.archive, linger=0.7) as server:
        found = run_ranks(3, _load_as_rank, folder, server.url, fake.md5)
        assert found == [fake.digest] * 3
        assert _load(folder, server.url) == fake.digest
        assert server.paths == [f"/pub/{ARCHIVE}"]


@pytest.mark.parametrize("mirror", ["{url}", "{url}/", "{url}/" + ARCHIVE])
def test_mirror_is_a_folder_or_the_archive(mirror, fake, tmp_path):
    """--mirror takes the URL of the folder, with or without a slash, or of the archive."""
    with _Server(fake.archive) as server:
        assert _load(tmp_path, mirror.format(url=server.url)) == fake.digest
        assert server.paths == [f"/pub/{ARCHIVE}"]


def test_what_is_there_needs_no_network(fake, tmp_path):
    """Complete files are read without a lock file; an archive copied by hand is unpacked."""
    nobody = f"http://127.0.0.1:{free_port()}"
    fake.unpack(tmp_path / "whole")
    before = sorted(tmp_path.rglob("*"))
    assert _load(tmp_path / "whole", nobody) == fake.digest
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ARCHIVE).write_bytes(fake.archive)
    assert _load(tmp_path, nobody) == fake.digest


def test_killed_in_the_middle_of_a_download(fake, tmp_path):
    """The process that waits downloads again; the partial file never counts as data."""
    with _Server(fake.archive, linger=60) as server, ThreadPoolExecutor() as pool:
        arguments = (0, tmp_path, server.url, fake.md5)
        first = ranks.context().Process(target=_load_as_rank, args=arguments, daemon=True)
        first.start()
        assert server.began.wait(60)
        wait_until((tmp_path / ARCHIVE).exists, "the beginning of the download")
        second = pool.submit(_load, tmp_path, server.url)
        time.sleep(0.3)  # time for it to find the first process at work
        assert len(server.paths) == 1
        first.kill()
        first.join(10)
        server.go_on.set()
        assert second.result(LONG) == fake.digest
        assert len(server.paths) == 2


@pytest.mark.parametrize(
    ("archive", "without", "damaged"),
    [
        (0.5, BATCHES, ()),
        (0.0, BATCHES, ()),
        (None, ("data_batch_5", "test_batch", "batches.meta"), ("data_batch_4",)),
        (None, ("batches.meta",), ()),
        (None, (), ("batches.meta",)),
        (None, (), ("data_batch_2",)),
    ],
)
def test_what_a_crash_left_is_replaced(fake, archive, without, damaged, tmp_path):
    """A cut archive or incomplete files do not count as data; the archive is downloaded again."""
    fake.unpack(tmp_path, without=without, damaged=damaged)
    if archive is not None:
        (tmp_path / ARCHIVE).write_bytes(fake.archive[: int(archive * len(fake.archive))])
    with _Server(fake.archive) as server:
        assert _load(tmp_path, server.url) == fake.digest
        assert len(server.paths) == 1


def _says_the_ways_out(message, *words):
    assert message.startswith("UserError: cifar10 "), message
    ways = ("--data-dir", "--mirror", "--dataset digits")
    assert all(word in message for word in (*ways, *words)), message
    assert "\n" not in message


def test_wrong_bytes_from_a_mirror_are_refused(fake, tmp_path):
    """A bad mirror is refused in one line with its URL; its bytes never count as data."""
    answers = {
        "other": {"content": fake.archive[:-1] + b"?"},
        "cut": {"content": fake.archive, "cut": 1000},
        "missing": {"content": b"", "status": 404},
        "garbage": {"content": b"", "garbage": b"SSH-2.0-OpenSSH_9.6\r\n"},
    }
    for name, answer in answers.items():
        with _Server(**answer) as server:
            message = _load(tmp_path / name, server.url)
            _says_the_ways_out(message, server.url, str(tmp_path / name), "data_batch_1")
            assert not (tmp_path / name / BASE).exists()
    with _Server(fake.archive) as server:  # the wrong archive is still there, and is replaced
        assert _load(tmp_path / "other", server.url) == fake.digest


def test_a_mirror_that_sends_without_end_is_left(fake, tmp_path, monkeypatch):
    """Else its bytes would fill the disk."""
    monkeypatch.setattr(cifar, "_MOST_BYTES", 1000)
    with _Server(bytes(3_000_000), length=False) as server:
        _says_the_ways_out(_load(tmp_path, server.url), server.url, "more than 1 kB came")
    assert (tmp_path / ARCHIVE).stat().st_size < 1_000_000
    assert not (tmp_path / BASE).exists()


@pytest.mark.parametrize("mirror", [None, "ftp", "http://[::1/", "http://127.0.0.1:{port}/a b"])
def test_offline_says_the_ways_out(mirror, fake, tmp_path):
    """Without a server or a valid URL, one line says what is missing, where, and what to do."""
    mirror = mirror and mirror.format(port=free_port())
    message = _load(tmp_path, mirror)
    _says_the_ways_out(message, str(tmp_path), "missing: data_batch_1, data_batch_2", "test_batch")
    assert _load(tmp_path, "") == message.partition(" and could not be downloaded")[0]


def test_offline_names_damaged_files(fake, tmp_path):
    """The message names exactly the missing files and the damaged ones, each as such."""
    fake.unpack(tmp_path, damaged=("data_batch_3",), without=("test_batch",))
    message = _load(tmp_path, f"http://127.0.0.1:{free_port()}")
    _says_the_ways_out(message, "missing: test_batch;", "MD5 is wrong: data_batch_3)")
    assert "data_batch_2" not in message
