"""Datasets: digits, image folders, the real CIFAR, and its download.

Several processes download from a server on loopback.
"""

import contextlib
import hashlib
import http.server
import io
import multiprocessing
import os
import pickle
import random
import struct
import tarfile
import threading
import time
import traceback
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.data import DATASETS, load_dataset
from common.data.dataset import Dataset, ImageSet, pixel_statistics
from common.errors import UserError
from tests.helpers import CIFAR, free_port, needs_cifar10, needs_cifar100, wait_until

_context = multiprocessing.get_context("forkserver")


def _checked(dataset, train, test, classes):
    """Check what every dataset guarantees: sizes, types, shapes, labels of every class."""
    for images, size in ((dataset.train, train), (dataset.test, test)):
        assert len(images) == size
        assert (images.images.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
        assert images.images.shape == (size, 32, 32, 3)
        assert images.labels.shape == (size,)
        assert images.labels.unique().tolist() == list(range(classes))
    assert len(dataset.class_names) == classes
    return dataset


# --- digits ---


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", Path("/nonexistent"))


def test_digits_split(digits):
    """1,437 training and 360 test samples, every class in the same proportion, no flips.

    A fifth of each class, within one sample, is in the test set. No image is in both sets, unless
    the source has it twice.
    """
    from sklearn.datasets import load_digits

    _checked(digits, 1437, 360, 10)
    assert digits.class_names == tuple("0123456789")
    assert digits.flip is False
    counts = [torch.bincount(images.labels, minlength=10) for images in (digits.train, digits.test)]
    assert (counts[0] + counts[1]).tolist() == np.bincount(load_digits().target).tolist()
    shares = counts[1] / (counts[0] + counts[1]) * 1797 / 360
    assert float((shares - 1).abs().max()) < 0.03


def test_digits_values_are_scikit_learns(digits):
    """Every image with its label comes from scikit-learn, and each is used once.

    Grey values 0 to 16 become 0 to 255, and a pixel becomes 4x4 pixels in three equal channels.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    expected = sorted(
        (np.rint(image * 255 / 16).astype(int).tolist(), int(label))
        for image, label in zip(source.images, source.target, strict=True)
    )
    found = []
    for images in (digits.train, digits.test):
        for image, label in zip(images.images, images.labels, strict=True):
            grey = image[::4, ::4, 0]
            assert torch.equal(
                image,
                grey.repeat_interleave(4, 0).repeat_interleave(4, 1)[..., None].expand(32, 32, 3),
            )
            found.append((grey.int().tolist(), int(label)))
    assert sorted(found) == expected
    assert (int(digits.train.images.min()), int(digits.train.images.max())) == (0, 255)


def test_digits_are_always_the_same(digits):
    """The split is fixed: it does not depend on the global random streams.

    Another call gives the same order, and so does the next commit.
    """
    torch.manual_seed(3)
    np.random.seed(3)
    again = load_dataset("digits", Path("/nonexistent"))
    for one, other in ((digits.train, again.train), (digits.test, again.test)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert digits.test.labels[:12].tolist() == DIGITS_TEST_LABELS
    assert not torch.equal(digits.train.labels[:300], digits.train.labels[:300].sort().values)


DIGITS_TEST_LABELS = [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]


def test_digits_statistics_are_of_the_training_pixels(digits):
    """Mean and deviation are those of the training set, as fractions of the full scale."""
    pixels = digits.train.images.double() / 255
    assert digits.mean == pytest.approx(pixels.mean(dim=(0, 1, 2)).tolist(), abs=1e-9)
    assert digits.std == pytest.approx(pixels.std(dim=(0, 1, 2), correction=0).tolist(), abs=1e-9)


def test_pixel_statistics_by_channel():
    """Each channel has its own statistics, and a constant one causes no division by zero."""
    images = torch.zeros(3, 4, 5, 3, dtype=torch.uint8)
    images[..., 1] = 255
    images[0, ..., 2] = 100
    mean, std = pixel_statistics(images)
    assert mean == pytest.approx((0, 1, 100 / 255 / 3))
    assert std[2] == pytest.approx(float((images[..., 2].double() / 255).std(correction=0)))
    assert all(value > 0 for value in std)


def test_unknown_dataset_names_the_choices():
    """An unknown name gives a UserError that lists every known name."""
    with pytest.raises(UserError) as error:
        load_dataset("mnist", Path("."))
    assert all(name in str(error.value) for name in ("mnist", *DATASETS))


@pytest.mark.parametrize(
    ("labels", "message"), [([], "no images"), ([0, 2], "2 classes"), ([-1, 0], "-1")]
)
def test_a_dataset_checks_itself(labels, message):
    """An empty set or a label outside the classes is refused; the message says in which set."""
    good = ImageSet(torch.zeros(2, 32, 32, 3, dtype=torch.uint8), torch.tensor([0, 1]))
    bad = ImageSet(
        torch.zeros(len(labels), 32, 32, 3, dtype=torch.uint8),
        torch.tensor(labels, dtype=torch.int64),
    )
    for train, test, which in ((bad, good, "training set"), (good, bad, "test set")):
        with pytest.raises(UserError, match=message) as error:
            Dataset("mine", train, test, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
        assert which in str(error.value)


# --- folder ---

COLOURS = {"blue": (10, 20, 230), "green": (5, 200, 15), "red": (250, 3, 8)}


def _picture(path, colour, *, size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def pictures(tmp_path):
    """Return a folder of images in three classes by colour, in many sizes and modes.

    They are PNG and JPEG files, next to files that are not images.
    """
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
    """Every image of each class is read as 32x32 RGB in its own colour.

    Classes are sorted by name. JPEG colours are approximate. Hidden folders are not classes, and
    other files are not images.
    """
    dataset = _checked(load_dataset("folder", pictures), 15, 3, 3)
    assert dataset.class_names == ("blue", "green", "red")
    for images in (dataset.train, dataset.test):
        for image, label in zip(images.images, images.labels, strict=True):
            colour = torch.tensor(COLOURS[dataset.class_names[label]])
            assert int((image.int() - colour).abs().max()) <= 3
    mean = torch.tensor(list(COLOURS.values())).double().mean(dim=0) / 255
    assert dataset.mean == pytest.approx(mean.tolist(), abs=0.01)


def test_folder_scales_the_middle_square(tmp_path):
    """A wide picture keeps its middle square, upright and not squeezed; the sides are cut off."""
    wide = np.zeros((64, 192, 3), dtype=np.uint8)
    wide[:, 64:128] = (0, 255, 0)
    wide[:32, 64:128, 0] = 255
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(wide).save(tmp_path / split / "a" / "wide.png")
    image = load_dataset("folder", tmp_path).train.images[0]
    assert (
        image[:, 1:31, 1] == 255
    ).all()  # scaling mixes the outermost columns with their neighbours
    assert (image[:15, 1:31, 0] == 255).all()
    assert (image[17:, :, 0] == 0).all()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "CMYK", "I;16"])
def test_folder_modes(mode, tmp_path):
    """Grey, palette, bilevel, CMYK and 16-bit pictures become the same 8-bit RGB, unclipped."""
    grey = np.tile(np.linspace(20, 235, 32).astype(np.uint8), (32, 1))
    picture = (
        Image.fromarray(grey.astype(np.uint16) * 257)
        if mode == "I;16"
        else Image.fromarray(grey).convert("RGB").convert(mode)
        if mode == "CMYK"
        else Image.fromarray(grey).convert(mode)
    )
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        picture.save(tmp_path / split / "a" / ("x.tif" if mode == "CMYK" else "x.png"))
    image = load_dataset("folder", tmp_path).train.images[0]
    if mode == "1":
        assert set(image.unique().tolist()) <= {0, 255}
    else:
        assert int((image.int() - torch.from_numpy(grey)[..., None].int()).abs().max()) <= 8


def _remove_tree(folder):
    for entry in sorted(folder.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    folder.rmdir()


def _break(pictures, how):
    """Damage the folder; return the words that the message must contain."""
    train, test = pictures / "train", pictures / "test"
    if how in ("no train", "no test"):
        folder = pictures / how.removeprefix("no ")
        _remove_tree(folder)
        return [str(folder), "missing"]
    if how == "nothing at all":
        _remove_tree(pictures)
        return [str(train), "missing"]
    if how == "train is a file":
        _remove_tree(train)
        train.write_text("x")
        return [str(train)]
    if how == "no classes":
        _remove_tree(train)
        _picture(train / "loose.png", (1, 2, 3))
        return [str(train), "<class>"]
    if how == "empty class":
        _remove_tree(train / "green")
        (train / "green").mkdir()
        (train / "green" / "notes.txt").write_text("x")
        return [str(train / "green"), "no image", ".png"]
    if how == "empty test":
        for image in test.rglob("*.jpeg"):
            image.unlink()
        return [str(test), "no image"]
    if how == "unknown class":
        _picture(test / "violet" / "x.png", (1, 2, 3))
        return [str(test), "violet"]
    path = train / "green" / "broken.png"
    picture = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(picture, "png")
    path.write_bytes(
        {
            "text": b"no image",
            "empty": b"",
            "cut": picture.getvalue()[:900],
            "bomb": _bomb(),
            "head": picture.getvalue()[:20],
        }[how]
    )
    return [str(path)]


def _bomb():
    """Return a PNG of a few bytes whose header claims 40,000 x 40,000 pixels."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "how",
    [
        "no train",
        "no test",
        "nothing at all",
        "train is a file",
        "no classes",
        "empty class",
        "empty test",
        "unknown class",
        "text",
        "empty",
        "cut",
        "head",
        "bomb",
    ],
)
def test_folder_errors(how, pictures):
    """Whatever is wrong with a folder, one line names the folder or file."""
    words = _break(pictures, how)
    with pytest.raises(UserError) as error:
        load_dataset("folder", pictures)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_folder_with_damaged_images(tmp_path):
    """A cut or altered image is read, or named in an error, but never causes a traceback.

    The test damages PNG and JPEG files with EXIF data at 120 seeded places.
    """
    places, refused = random.Random(0), 0
    noise = Image.effect_noise((48, 40), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    _picture(tmp_path / "test" / "a" / "x.png", (1, 2, 3))
    for kind in ("png", "jpg"):
        whole = io.BytesIO()
        noise.save(whole, {"png": "PNG", "jpg": "JPEG"}[kind], exif=exif)
        path = tmp_path / "train" / "a" / f"x.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        for turn in range(60):
            content, place = bytearray(whole.getvalue()), places.randrange(len(whole.getvalue()))
            if turn % 2:
                place = min(place, places.randrange(300))  # mostly headers
            content[place] ^= places.randrange(1, 256)
            path.write_bytes(bytes(content[:place]) if turn % 4 == 0 else bytes(content))
            try:
                dataset = load_dataset("folder", tmp_path)
            except UserError as error:
                refused += str(path) in str(error)
            else:
                assert len(dataset.train) == 1
        path.unlink()
    assert refused > 20


# --- the real CIFAR ---


def _like_torchvision(dataset, kind):
    """Check all labels, the class names and some images against torchvision's own dataset."""
    for images, is_train in ((dataset.train, True), (dataset.test, False)):
        theirs = kind(str(CIFAR), train=is_train)
        assert images.labels.tolist() == theirs.targets
        for i in (0, 1, 77, 9_999, len(images) // 2, len(images) - 1):
            picture, label = theirs[i]
            assert np.array_equal(images.images[i].numpy(), np.asarray(picture))
            assert int(images.labels[i]) == label
        assert dataset.class_names == tuple(theirs.classes)


def _statistics_are_right(dataset, *, tolerance):
    """Check that the constants are the statistics of the training pixels."""
    mean, std = pixel_statistics(dataset.train.images)
    assert dataset.mean == pytest.approx(mean, abs=tolerance)
    assert dataset.std == pytest.approx(std, abs=0.015)


@needs_cifar10
@pytest.mark.cifar
def test_cifar10_is_torchvisions():
    """The real files give 50,000 and 10,000 images with labels, names and statistics.

    Flips are on, since a mirrored image stays in its class.
    """
    from torchvision.datasets import CIFAR10

    dataset = _checked(load_dataset("cifar10", CIFAR), 50_000, 10_000, 10)
    _like_torchvision(dataset, CIFAR10)
    assert dataset.class_names[:2] + dataset.class_names[-1:] == ("airplane", "automobile", "truck")
    assert torch.bincount(dataset.train.labels).tolist() == [5_000] * 10
    _statistics_are_right(dataset, tolerance=0.003)
    assert dataset.flip is True


@pytest.mark.slow
@needs_cifar100
@pytest.mark.cifar
def test_cifar100_is_torchvisions():
    """The labels are the 100 fine classes, not the 20 coarse ones."""
    from torchvision.datasets import CIFAR100

    dataset = _checked(load_dataset("cifar100", CIFAR), 50_000, 10_000, 100)
    _like_torchvision(dataset, CIFAR100)
    assert dataset.class_names[:2] + dataset.class_names[-1:] == ("apple", "aquarium_fish", "worm")
    assert torch.bincount(dataset.train.labels).tolist() == [500] * 100
    _statistics_are_right(dataset, tolerance=0.003)


# --- download ---

BASE, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
PER_BATCH = 20


class _Fake:
    """A small CIFAR-10: its archive, files, MD5 sums and a digest of its images."""

    def __init__(self):
        random_bytes, md5 = (
            np.random.default_rng(0),
            lambda content: hashlib.md5(content).hexdigest(),
        )
        self.files, images = {}, []
        for name in BATCHES:
            data = random_bytes.integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8)
            images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            self.files[name] = pickle.dumps(
                {"data": data, "labels": [i % 10 for i in range(PER_BATCH)]}
            )
        self.files["batches.meta"] = pickle.dumps(
            {"label_names": [f"class {i}" for i in range(10)]}
        )
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in self.files.items():
                member = tarfile.TarInfo(f"{BASE}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        self.archive = buffer.getvalue()
        self.md5 = {name: md5(content) for name, content in self.files.items()} | {
            ARCHIVE: md5(self.archive)
        }
        self.digest = _digest(np.concatenate(images))

    def unpack(self, data_dir, *, without=(), damaged=()):
        (data_dir / BASE).mkdir(parents=True)
        for name, content in self.files.items():
            if name not in without:
                (data_dir / BASE / name).write_bytes(
                    content[:-1] + b"?" if name in damaged else content
                )


def _digest(images):
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()


def _use_small_archive(md5, change):
    """Give torchvision's class the MD5 sums of the small archive.

    All other code, torchvision's and the project's, stays real.
    """
    from torchvision.datasets import CIFAR10

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


def _child_main(data_dir, mirror, md5, gate, results):
    try:
        torch.set_num_threads(1)
        os.environ |= {"no_proxy": "*", "NO_PROXY": "*"}
        _use_small_archive(md5, setattr)
        # imported early, so that all processes load at the same moment
        import common.data.cifar  # noqa: F401

        results.put("ready")
        gate.wait(60)
        results.put(_load(data_dir, mirror))
    except BaseException:
        results.put("failed:\n" + traceback.format_exc())


class _Children:
    """Processes that load the small archive at the same moment; they end with the block."""

    def __init__(self, number, data_dir, mirror, md5):
        # Keep the gate: if its creator frees a barrier, the children cannot open it.
        self._gate, self._results = _context.Barrier(number), _context.SimpleQueue()
        self.processes = [
            _context.Process(
                target=_child_main,
                daemon=True,
                args=(data_dir, mirror, md5, self._gate, self._results),
            )
            for _ in range(number)
        ]

    def result(self):
        """Return the next result; fail if none arrives within 60 s."""
        assert self._results._reader.poll(60), [process.exitcode for process in self.processes]
        return self._results.get()

    def __enter__(self):
        """Start the processes; return when all are about to load."""
        for process in self.processes:
            process.start()
        for _ in self.processes:
            assert self.result() == "ready"
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.join(0 if any(error) else 10)
            if process.is_alive():
                process.kill()
                process.join()


class _Server:
    """A mirror on loopback: it counts requests and can delay, cut or spoil its answers."""

    def __init__(self, content, *, status=200, cut=None, linger=0.0, garbage=None, length=True):
        self.downloads, self.paths, self.began = 0, [], threading.Event()
        self.go_on = threading.Event()
        lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 30

            def do_GET(self):
                with lock:
                    outer.paths.append(self.path)
                if garbage is not None:
                    self.wfile.write(garbage)
                    return
                self.send_response(status)
                if length:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with lock:
                    outer.downloads += 1
                with contextlib.suppress(OSError):
                    self.wfile.write(content[: cut if cut is not None else len(content) // 2])
                    self.wfile.flush()
                    outer.began.set()
                    if linger:
                        outer.go_on.wait(linger)
                    if cut is None:
                        self.wfile.write(content[len(content) // 2 :])

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/pub"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture(scope="module")
def _archive():
    return _Fake()


@pytest.fixture
def fake(_archive, monkeypatch):
    """Return the small archive, and make torchvision's class accept it in this process, too."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "*")
    _use_small_archive(_archive.md5, monkeypatch.setattr)
    return _archive


@pytest.mark.parametrize("length", [True, False])
def test_download_shows_what_has_arrived(tmp_path, capsys, monkeypatch, length):
    """Off a terminal the size stands in the first line; a line follows whenever one is due."""
    from common.data import download
    from common.utils import progress

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    content = bytes(3_000_000)
    with _Server(content, length=length) as server:
        download.fetch(f"{server.url}/file.bin", tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == content
    first, *lines = capsys.readouterr().out.splitlines()
    size = " (3 MB)" if length else ""
    assert first == f"downloading {server.url}/file.bin{size} to {tmp_path}"
    of = " of 3" if length else ""
    assert lines[-1].startswith(f"download of file.bin: 3{of} MB")
    assert any(line.startswith(f"download of file.bin: 1{of} MB") for line in lines)


def test_several_processes_download_once(fake, tmp_path):
    """Three processes that start at once download once, and all read the correct data.

    The server pauses in the middle, so that a second download would show. A later start sends no
    request.
    """
    folder = tmp_path / "new" / "data"
    with _Server(fake.archive, linger=0.7) as server:
        with _Children(3, folder, server.url, fake.md5) as children:
            assert [children.result() for _ in range(3)] == [fake.digest] * 3
        assert server.downloads == 1
        asked = len(server.paths)
        assert _load(folder, server.url) == fake.digest
        assert len(server.paths) == asked


@pytest.mark.parametrize("mirror", ["{url}", "{url}/", "{url}/" + ARCHIVE])
def test_mirror_is_a_folder_or_the_archive(mirror, fake, tmp_path):
    """--mirror takes the URL of the folder, with or without a slash, or of the archive."""
    with _Server(fake.archive) as server:
        assert _load(tmp_path, mirror.format(url=server.url)) == fake.digest
        assert set(server.paths) == {f"/pub/{ARCHIVE}"}


def test_whole_files_need_no_network_and_no_writing(fake, tmp_path):
    """Complete files are read without a request, a lock file or an archive."""
    fake.unpack(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert _load(tmp_path, f"http://127.0.0.1:{free_port()}") == fake.digest
    assert sorted(tmp_path.rglob("*")) == before


def test_killed_in_the_middle_of_a_download(fake, tmp_path):
    """If SIGKILL ends the process that downloads, the one that waits downloads again.

    The partial file never counts as data.
    """
    with (
        _Server(fake.archive, linger=60) as server,
        _Children(1, tmp_path, server.url, fake.md5) as first,
    ):
        assert server.began.wait(60)
        wait_until((tmp_path / ARCHIVE).exists, "the beginning of the download")
        with _Children(1, tmp_path, server.url, fake.md5) as second:
            time.sleep(0.3)  # time for it to find the first process at work
            assert server.downloads == 1
            first.processes[0].kill()
            first.processes[0].join(10)
            server.go_on.set()
            assert second.result() == fake.digest
        assert server.downloads == 2


@pytest.mark.parametrize(
    "left",
    [
        "half an archive",
        "empty archive",
        "half extracted",
        "no list of classes",
        "damaged list of classes",
        "damaged batch",
        "empty batch",
    ],
)
def test_what_a_crash_left_is_replaced(fake, left, tmp_path):
    """A cut archive or incomplete files do not count as data; the archive is downloaded again."""
    if left == "half an archive":
        (tmp_path / ARCHIVE).write_bytes(fake.archive[: len(fake.archive) // 2])
    elif left == "empty archive":
        (tmp_path / ARCHIVE).write_bytes(b"")
    elif left == "half extracted":
        fake.unpack(
            tmp_path,
            without=("data_batch_5", "test_batch", "batches.meta"),
            damaged=("data_batch_4",),
        )
    elif left == "no list of classes":
        fake.unpack(tmp_path, without=("batches.meta",))
    elif left == "damaged list of classes":
        fake.unpack(tmp_path, damaged=("batches.meta",))
    else:
        fake.unpack(tmp_path, damaged=("data_batch_2",))
        if left == "empty batch":
            (tmp_path / BASE / "data_batch_2").write_bytes(b"")
    with _Server(fake.archive) as server:
        assert _load(tmp_path, server.url) == fake.digest
        assert server.downloads == 1


def test_archive_that_is_there_is_unpacked_without_a_download(fake, tmp_path):
    """An archive left by a crash or copied by hand is unpacked without a request."""
    (tmp_path / ARCHIVE).write_bytes(fake.archive)
    assert _load(tmp_path, f"http://127.0.0.1:{free_port()}") == fake.digest


def _says_the_ways_out(message, *words):
    assert message.startswith("UserError: cifar10 "), message
    assert all(
        word in message for word in ("--data-dir", "--mirror", "--dataset digits", *words)
    ), message
    assert "\n" not in message


def test_wrong_bytes_from_a_mirror_are_refused(fake, tmp_path):
    """A bad mirror is refused in one line with its URL and what to do instead.

    It has another archive, an error page or no file, stops half-way, or does not speak HTTP. Its
    bytes never count as data.
    """
    other = bytearray(fake.archive)
    other[len(other) // 2] ^= 1
    for name, answer in {
        "other": {"content": bytes(other)},
        "page": {"content": b"<html>Not here</html>"},
        "cut": {"content": fake.archive, "cut": 1000},
        "missing": {"content": b"", "status": 404},
        "garbage": {"content": b"", "garbage": b"SSH-2.0-OpenSSH_9.6\r\n"},
    }.items():
        with _Server(**answer) as server:
            message = _load(tmp_path / name, server.url)
            _says_the_ways_out(message, server.url, str(tmp_path / name), "data_batch_1")
            assert not (tmp_path / name / BASE).exists()
    with _Server(
        fake.archive
    ) as server:  # the wrong archive, which is still in the folder, is replaced
        assert _load(tmp_path / "other", server.url) == fake.digest


@pytest.mark.parametrize(
    "mirror",
    [
        "http://127.0.0.1:{port}",
        None,
        "ftp-server",
        "",
        "http://127.0.0.1:port/",
        "http://[::1/",
        "file:///nonexistent",
        "http://127.0.0.1:{port}/a b",
    ],
)
def test_offline_says_the_ways_out(mirror, fake, tmp_path):
    """Without a server or a valid URL, one line says what is missing, where, and what to do.

    It offers --data-dir, --mirror and --dataset digits.
    """
    mirror = mirror and mirror.format(port=free_port())
    message = _load(tmp_path, mirror)
    _says_the_ways_out(message, str(tmp_path), "missing: data_batch_1, data_batch_2", "test_batch")


def test_offline_names_damaged_files(fake, tmp_path):
    """The message names exactly the missing files and the damaged ones, each as such."""
    fake.unpack(tmp_path, damaged=("data_batch_3",), without=("test_batch",))
    message = _load(tmp_path, f"http://127.0.0.1:{free_port()}")
    _says_the_ways_out(message, "missing: test_batch;", "MD5 is wrong: data_batch_3)")
    assert "data_batch_2" not in message


def test_data_dir_that_cannot_be(fake, tmp_path):
    """A data folder below a regular file gives one line with the path and the reason."""
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "data"):
        message = _load(folder, f"http://127.0.0.1:{free_port()}")
        _says_the_ways_out(message, str(folder))
    assert (tmp_path / "file").read_text() == "x"
