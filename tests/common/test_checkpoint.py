"""Checkpoints: exact, atomic, verified when read, and unable to run code."""

import io
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import time
import traceback
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import common.checkpoint
import common.utils.atomic_files
from common.checkpoint import (
    checkpoint_path,
    load_checkpoint,
    load_model_state,
    newest_checkpoint,
    save_checkpoint,
)
from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.hashing import digest
from tests import helpers
from tests.helpers import wait_until

assert helpers.ROOT  # importing helpers tells the fork server which modules to preload
_context = multiprocessing.get_context("forkserver")


def _small_model(*, seed=0, channels=4):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * 4, 5),
    )
    return model.to(memory_format=torch.channels_last)


def _trained(*, steps=3):
    """Return a channels_last model and an optimiser with momentum after some steps."""
    model = _small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _entries(model, optimizer, *, epoch=3):
    return {
        "epoch": epoch,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": 1.2345678901234567,
        "schedule": {"steps": [1, 2, (3, 4.5)], "name": "onecycle", "none": None},
        "bf16": torch.randn(3).bfloat16(),
        "empty": torch.empty(0),
        "flag": True,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the bytes of a saved checkpoint and the entries that it must give back."""
    path = tmp_path_factory.mktemp("saved") / "Epoch_3.pt"
    entries = _entries(*_trained())
    save_checkpoint(path, entries)
    return path.read_bytes(), entries


def _same(one, other):
    """Return whether two values are equal in every bit, type, key and order.

    -0.0 differs from 0.0, and a NaN equals itself.
    """
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(other.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _refused(source, **name):
    with pytest.raises(UserError) as error:
        load_checkpoint(source, **name)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- exact ---


def test_roundtrip_is_bit_exact(saved, tmp_path):
    """Weights, buffers, momentum and plain values keep every bit and type.

    They come from a file or from its bytes.
    """
    content, entries = saved
    path = tmp_path / "Epoch_3.pt"
    path.write_bytes(content)
    for loaded in (
        load_checkpoint(path),
        load_checkpoint(str(path)),
        load_checkpoint(content, name="from rank 0"),
    ):
        assert _same(dict(entries), loaded)


def test_training_goes_on_from_it_exactly(saved):
    """A restored model and optimiser take the same next step, bit for bit, as without a break.

    The weights keep their channels_last strides.
    """
    model, optimizer = _trained()
    loaded = load_checkpoint(saved[0], name="saved")
    other = _small_model(seed=9)
    load_model_state(other, loaded, name="saved")
    resumed = torch.optim.SGD(other.parameters(), lr=5.0)
    resumed.load_state_dict(loaded["optimizer_state_dict"])
    torch.manual_seed(4)
    images = torch.randn(6, 3, 4, 4)
    for one, steps in ((model, optimizer), (other, resumed)):
        steps.zero_grad()
        one(images).square().mean().backward()
        steps.step()
    assert _same(dict(model.state_dict()), dict(other.state_dict()))
    assert other[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not other[0].weight.is_contiguous()


def test_channels_last_weights_keep_their_layout(saved):
    """Weights saved with channels_last strides load with the same strides."""
    weight = load_checkpoint(saved[0], name="saved")["model_state_dict"]["0.weight"]
    assert weight.stride() == saved[1]["model_state_dict"]["0.weight"].stride()


def test_prefix_of_a_wrapped_model_is_removed(tmp_path):
    """Weights saved from a DistributedDataParallel model fit the plain one.

    Loading removes only a leading ``module.``.
    """
    model, optimizer = _trained()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    state["inner.module.weight"] = torch.ones(1)
    save_checkpoint(
        tmp_path / "Epoch_1.pt", _entries(model, optimizer) | {"model_state_dict": state}
    )
    loaded = load_checkpoint(tmp_path / "Epoch_1.pt")
    assert loaded["model_state_dict"].pop("inner.module.weight") == 1
    other = _small_model(seed=9)
    load_model_state(other, loaded, name="wrapped")
    assert _same(dict(model.state_dict()), dict(other.state_dict()))


def test_path_and_mode(tmp_path):
    """The name is Epoch_n.pt, missing folders are created, and the mode is a new file's default."""
    path = checkpoint_path(tmp_path / "a" / "b", 12)
    assert path == tmp_path / "a" / "b" / "Epoch_12.pt"
    save_checkpoint(path, _entries(*_trained(steps=1)))
    (tmp_path / "plain").write_text("")
    assert oct(path.stat().st_mode) == oct((tmp_path / "plain").stat().st_mode)


def test_digest_sees_every_kind_of_change():
    """Values, bits, types, shapes, names and nesting change the digest; strides do not."""
    base = {"a": torch.arange(6.0).view(2, 3), "b": [1, 2.0, "x", None, True]}
    changed = [
        {"a": base["a"].view(3, 2), "b": base["b"]},
        {"a": base["a"].double(), "b": base["b"]},
        {"a": base["a"].int(), "b": base["b"]},
        {"A": base["a"], "b": base["b"]},
        {"a": base["a"]},
        {"a": base["a"].nextafter(torch.tensor(9.0)), "b": base["b"]},
        {"a": -base["a"], "b": base["b"]},
        {"a": base["a"], "b": [1, 2, "x", None, True]},
        {"a": base["a"], "b": [1, 2.0, "x", None, 1]},
        {"a": base["a"], "b": [1, 2.0, "x", "None", True]},
        {"a": base["a"], "b": [1, 2.0, ["x", None], True]},
        {"a": base["a"], "b": [1, 2.0, "x", True, None]},
    ]
    digests = [digest(value) for value in (base, *changed)]
    assert len(set(digests)) == len(digests)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    one = torch.randn(4, 2)[:1, 0]  # a single value with stride 2
    assert digest(one) == digest(torch.tensor(one.tolist()))
    image = torch.randn(2, 3, 4, 4)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last))


# --- damaged ---


def test_cut_anywhere(saved):
    """Wherever the file is cut, a one-line UserError names it."""
    content = saved[0]
    places = {
        0,
        1,
        3,
        4,
        10,
        100,
        len(content) - 1,
        len(content) - 2,
        len(content) - 22,
        len(content) - 23,
    }
    places |= {len(content) * i // 60 for i in range(60)}
    for place in sorted(places):
        assert "Epoch_7" in _refused(content[:place], name="Epoch_7"), place


def test_holes_and_tails(saved):
    """A block of zeroes or extra bytes around the file: refused, or the same entries.

    A crashed disk leaves such blocks.
    """
    content, entries = saved
    for begin in range(0, len(content), 512):
        hole = content[:begin] + bytes(min(512, len(content) - begin)) + content[begin + 512 :]
        _same_or_refused(hole, entries)
    for other in (content + b"tail", b"head" + content, content + content):
        _same_or_refused(other, entries)


def _same_or_refused(content, entries):
    """Return True if the damaged file is refused, False if its entries are exact; else fail."""
    try:
        loaded = load_checkpoint(content, name="damaged")
    except UserError:
        return True
    assert _same(dict(entries), loaded)
    return False


def _flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_single_flipped_bits(saved):
    """A flipped bit anywhere is refused or harmless (in padding or an unused field)."""
    content, entries = saved
    random_places = random.Random(0)
    refused = sum(
        _same_or_refused(
            _flipped(content, random_places.randrange(len(content)), random_places.randrange(8)),
            entries,
        )
        for _ in range(200)
    )
    assert refused > 60  # tensors and pickle are more than half of the file


def test_each_bit_of_a_tensor(saved):
    """Every flipped bit in a tensor is refused, in the weights and in the momentum."""
    content, entries = saved
    momentum = entries["optimizer_state_dict"]["state"][1]["momentum_buffer"]
    for tensor in (entries["model_state_dict"]["0.bias"], momentum):
        found = tensor.detach().numpy().tobytes()
        assert content.count(found) == 1
        begin = content.index(found)
        for place in range(begin, begin + len(found)):
            for bit in range(8):
                assert _same_or_refused(_flipped(content, place, bit), entries), (place, bit)


def test_each_bit_of_plain_values_and_names(saved):
    """Every flipped bit in the epoch, the loss, a key or the digest is refused or harmless.

    No flip in the digest or its key may make the file pass as one without a digest.
    """
    content, entries = saved
    begin = content.index(b"sha256")
    places = [*range(begin, begin + 6), *range(begin + 20, begin + 60, 7)]
    for name in (b"epoch", b"loss", b"onecycle", b"momentum_buffer", b"0.weight"):
        begin = content.index(name)
        places += range(begin, begin + len(name))
    places += range(content.index(b"lossq"), content.index(b"lossq") + 15)
    for place in places:
        for bit in range(8):
            _same_or_refused(_flipped(content, place, bit), entries)


def test_one_bit_of_each_byte_of_the_structure(saved):
    """A flipped bit in the structure of the file is refused or harmless; no other error occurs.

    The test flips a bit in each byte of the pickled names, shapes and strides, and every bit in the
    first and last headers of the archive.
    """
    content, entries = saved
    bits = random.Random(2)
    pickled = range(content.index(b"\x80\x02"), content.index(b"PK\x07\x08"))
    for place in pickled:
        _same_or_refused(_flipped(content, place, bits.randrange(8)), entries)
    directory = content.index(b"PK\x01\x02")
    for place in (
        *range(pickled.start),
        *range(directory, directory + 62),
        *range(len(content) - 98, len(content)),
    ):
        for bit in range(8):
            _same_or_refused(_flipped(content, place, bit), entries)


def test_altered_with_the_digest_left_as_it_was(saved, tmp_path):
    """A valid file with a changed entry and the old digest fails its SHA-256.

    torch itself loads and saves the changed file.
    """

    def weight(entries):
        entries["model_state_dict"]["0.bias"][0] += 1e-6

    def momentum(entries):
        entries["optimizer_state_dict"]["state"][0]["momentum_buffer"][0] += 1e-6

    def epoch(entries):
        entries["epoch"] += 1

    for alter in (weight, momentum, epoch):
        entries = torch.load(io.BytesIO(saved[0]), weights_only=True)
        alter(entries)
        torch.save(entries, tmp_path / "Epoch_3.pt")
        assert "SHA-256" in _refused(tmp_path / "Epoch_3.pt"), alter.__name__


# --- hostile and foreign ---


class _Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path, how):
        self.path, self.how = str(path), how

    def __reduce__(self):
        if self.how == "system":
            return os.system, (f"touch {self.path}",)
        if self.how == "exec":
            return exec, (f"open({self.path!r}, 'w').close()",)
        return open, (self.path, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["system", "exec", "open"])
def test_hostile_pickle_runs_no_code(how, saved, tmp_path):
    """Code hidden in a checkpoint is refused and does not run.

    torch.save or a bare pickle hides it, in an entry or in place of all entries. At the end
    pickle.loads shows that the code works.
    """
    mark = tmp_path / "mark"
    hostile = _Touch(mark, how)
    whole = saved[1]
    for entries in (hostile, {**whole, "loss": hostile}, {**whole, "extra": [hostile]}):
        buffer = io.BytesIO()
        torch.save(entries, buffer)
        legacy = io.BytesIO()
        torch.save(entries, legacy, _use_new_zipfile_serialization=False)
        for content in (buffer.getvalue(), legacy.getvalue(), pickle.dumps(entries)):
            path = tmp_path / "Epoch_1.pt"
            path.write_bytes(content)
            assert str(path) in _refused(path)
            assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists()


def _foreign(kind, entries):
    buffer = io.BytesIO()
    if kind == "text":
        return b"This is a letter, not a checkpoint.\n" * 50
    if kind == "empty":
        return b""
    if kind == "zeroes":
        return bytes(4096)
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("archive/data.txt", "hello")
    elif kind == "pickle":
        return pickle.dumps({"epoch": 1})
    elif kind == "png":
        from PIL import Image

        Image.new("RGB", (8, 8)).save(buffer, "png")
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    elif kind == "whole model":
        torch.save(nn.Linear(2, 2), buffer)
    elif kind == "bare state_dict":
        torch.save(nn.Linear(2, 2).state_dict(), buffer)
    elif kind == "tensor":
        torch.save(torch.ones(4), buffer)
    elif kind == "list":
        torch.save([1, 2, 3], buffer)
    elif kind == "no optimizer":
        torch.save(
            {key: value for key, value in entries.items() if key != "optimizer_state_dict"}, buffer
        )
    elif kind == "weights are a list":
        torch.save({**entries, "model_state_dict": [1, 2]}, buffer)
    elif kind == "weights are None":
        torch.save({**entries, "model_state_dict": None}, buffer)
    elif kind == "weights named by number":
        torch.save({**entries, "model_state_dict": {0: torch.ones(2)}}, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "empty",
        "zeroes",
        "zip",
        "pickle",
        "png",
        "torchscript",
        "whole model",
        "bare state_dict",
        "tensor",
        "list",
        "no optimizer",
        "weights are a list",
        "weights are None",
        "weights named by number",
    ],
)
def test_foreign_files(kind, saved, tmp_path):
    """A file that is not a training checkpoint is refused in one line with its name."""
    path = tmp_path / "Epoch_1.pt"
    path.write_bytes(_foreign(kind, saved[1]))
    assert str(path) in _refused(path)


def test_missing_file_and_folder(tmp_path):
    """A missing path, a folder or a path below a file is refused in one line with its name."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "Epoch_1.pt", tmp_path, tmp_path / "file" / "Epoch_1.pt"):
        assert str(path) in _refused(path)


def test_message_about_bytes_does_not_print_them(saved):
    """The message about bytes without a name does not contain them."""
    assert len(_refused(saved[0][:1000])) < 400


# --- another architecture ---


def test_other_architectures_weights(saved):
    """Another width or number of layers: the error names an entry; the model is unchanged."""
    loaded = load_checkpoint(saved[0], name="saved")
    wider, deeper = _small_model(channels=5), nn.Sequential(*_small_model(), nn.Linear(5, 5))
    shorter = nn.Sequential(*list(_small_model())[:2])
    for model, entry in ((wider, "'0.weight'"), (deeper, "'5.weight'"), (shorter, "'4.weight'")):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(UserError, match=r"Epoch_3\.pt.*another model") as error:
            load_model_state(model, loaded, name="Epoch_3.pt")
        assert entry in str(error.value)
        assert _same(before, dict(model.state_dict()))


@pytest.mark.parametrize("value", [1.5, "text", None, [1.0]])
def test_weights_that_are_no_tensors(value, saved):
    """A plain value in place of a tensor is reported as a difference, without a traceback."""
    loaded = load_checkpoint(saved[0], name="saved")
    loaded["model_state_dict"]["0.bias"] = value
    with pytest.raises(UserError, match=r"'0\.bias'"):
        load_model_state(_small_model(), loaded, name="Epoch_3.pt")


# --- atomic ---


def _in_child(function, *arguments):
    """Call the function in a child process; return its result, or fail with its error."""
    results = _context.SimpleQueue()
    child = _context.Process(target=_child_main, args=(function, arguments, results), daemon=True)
    child.start()
    try:
        assert results._reader.poll(60), "the child did not answer"
        error, result = results.get()
        assert error is None, error
        return result
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()


def _child_main(function, arguments, results):
    torch.set_num_threads(1)
    try:
        results.put((None, function(*arguments)))
    except BaseException:
        results.put((traceback.format_exc(), None))


def _save_with_little_room(path, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save_checkpoint(Path(path), _entries(*_trained(), epoch=4))
    except UserError as error:
        return str(error)
    return None


def test_full_disk_leaves_the_old_file(saved, tmp_path):
    """If the disk is full, the error names the path and the old file is unchanged.

    There is room for 0, 2,000 or 5,000 bytes. Without an old file there is no new one, and no
    temporary file remains.
    """
    old, new = tmp_path / "Epoch_3.pt", tmp_path / "Epoch_4.pt"
    old.write_bytes(saved[0])
    for path, limit in ((old, 2000), (old, 0), (new, 5000)):
        message = _in_child(_save_with_little_room, str(path), limit)
        assert message is not None
        assert str(path) in message
        assert "\n" not in message
        assert [entry.name for entry in tmp_path.iterdir()] == ["Epoch_3.pt"]
        assert old.read_bytes() == saved[0]
    assert _in_child(_save_with_little_room, str(new), 10**6) is None
    assert load_checkpoint(new)["epoch"] == 4


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_error_at_the_last_moment(fails, saved, tmp_path, monkeypatch):
    """If fsync or rename fails, only the old file remains.

    Network disks report this way that they are full.
    """
    path = tmp_path / "Epoch_3.pt"
    path.write_bytes(saved[0])

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common.utils.atomic_files.os, fails, refuse)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["Epoch_3.pt"]
    assert path.read_bytes() == saved[0]


def test_folder_that_vanishes(tmp_path, monkeypatch):
    """If the folder vanishes during a write, a UserError says so, without a second error.

    The cleanup must not fail.
    """
    folder = tmp_path / "run"

    def vanish(*_):
        shutil.rmtree(folder)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(common.utils.atomic_files.os, "replace", vanish)
    with pytest.raises(UserError, match="No such file"):
        write_atomically(folder / "Epoch_1.pt", b"new")


def test_folder_that_cannot_be(tmp_path):
    """A path below a file, or equal to a folder: the error names it, and both stay unchanged."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "Epoch_1.pt").mkdir()
    for path in (
        tmp_path / "file" / "Epoch_1.pt",
        tmp_path / "file" / "deep" / "Epoch_1.pt",
        tmp_path / "Epoch_1.pt",
    ):
        with pytest.raises(UserError) as error:
            save_checkpoint(path, _entries(*_trained(steps=1)))
        assert str(path) in str(error.value)
    assert (tmp_path / "file").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["Epoch_1.pt", "file"]


def test_order_of_sync_and_rename(tmp_path, monkeypatch):
    """The file is synced before the rename, and the folder after it.

    Hence a power cut leaves either the old file or the new one.
    """
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle):
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "sync file")
        fsync(handle)

    def note_replace(source, target):
        assert Path(source).parent == Path(target).parent
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(common.utils.atomic_files.os, "fsync", note_fsync)
    monkeypatch.setattr(common.utils.atomic_files.os, "replace", note_replace)
    write_atomically(tmp_path / "Epoch_1.pt", b"content")
    assert events == ["sync file", "rename", "sync folder"]


def _save_for_ever(path, floats):
    torch.set_num_threads(1)
    while True:
        for epoch in (1, 2):
            save_checkpoint(
                Path(path),
                {
                    "epoch": epoch,
                    "model_state_dict": {"w": torch.full((floats,), float(epoch))},
                    "optimizer_state_dict": {},
                    "loss": 0.0,
                },
            )


def test_killed_while_saving(tmp_path):
    """Ten processes that save repeatedly are killed with SIGKILL; each file is complete.

    A read while the process saves also finds a complete file.
    """
    delays = random.Random(1)
    for turn in range(10):
        path = tmp_path / f"Epoch_{turn}.pt"
        child = _context.Process(target=_save_for_ever, args=(str(path), 500_000), daemon=True)
        child.start()
        try:
            wait_until(
                lambda path=path, child=child: path.exists() or not child.is_alive(),
                "the first checkpoint",
            )
            assert child.is_alive()
            for _ in range(2):
                _whole(path)
            time.sleep(delays.uniform(0, 0.05))  # the kill comes at a random moment
        finally:
            child.kill()
            child.join(10)
        _whole(path)


def _whole(path):
    loaded = load_checkpoint(path)
    assert torch.equal(
        loaded["model_state_dict"]["w"], torch.full((500_000,), float(loaded["epoch"]))
    )


# --- the newest good checkpoint ---


def test_newest_passes_over_damaged_ones(saved, tmp_path):
    """Of checkpoints saved at the same time, the newest is the highest epoch, as a number.

    Then the first folder counts. A damaged, cut or foreign file is skipped and named with its
    reason. Temporary and other files do not count.
    """
    content = saved[0]
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    for epoch in (2, 9, 10):
        (old / f"Epoch_{epoch}.pt").write_bytes(content)
    assert newest_checkpoint([tmp_path / "none", new, old]) == (old / "Epoch_10.pt", [])
    for epoch in (1, 2):
        (new / f"Epoch_{epoch}.pt").write_bytes(content)
    assert newest_checkpoint([new, old]) == (new / "Epoch_2.pt", [])

    (new / "Epoch_11.pt").write_bytes(content[:-500])
    (new / "Epoch_3.pt").write_bytes(b"")
    damaged = content.index(saved[1]["model_state_dict"]["0.bias"].numpy().tobytes())
    (new / "Epoch_100.pt").write_bytes(_flipped(content, damaged, 3))
    (new / ".Epoch_200.pt.abc").write_bytes(content)
    (new / "Epoch_x.pt").write_bytes(content)
    (new / "Epoch_300.pt.bak").write_bytes(content)
    found, passed_over = newest_checkpoint([new, old])
    assert found == new / "Epoch_2.pt"
    assert len(passed_over) == 3
    for name in ("Epoch_100.pt", "Epoch_11.pt", "Epoch_3.pt"):
        [line] = [line for line in passed_over if name in line]
        assert "\n" not in line


def test_newest_is_the_one_saved_last(tmp_path, monkeypatch):
    """The time of saving decides, not the folder's name, the file's name or its time of change.

    Of equal times the higher step counts. A checkpoint without a record of its time has its file's
    time of change. Nothing but the chosen one is read whole.
    """
    plain = {"epoch": 1, "loss": 0.0, "model_state_dict": {}, "optimizer_state_dict": {}}
    folders = [tmp_path / name for name in ("z-old", "a-new", "m-same-time")]
    saved_at = (1_000.0, 3_000.0, 3_000.0)
    for folder, moment, step in zip(folders, saved_at, (90, 5, 6), strict=True):
        monkeypatch.setattr(common.checkpoint.time, "time", lambda moment=moment: moment)
        save_checkpoint(folder / f"Epoch_{100 - step}.pt", plain | {"step": step})
    os.utime(folders[0] / "Epoch_10.pt", (9e8, 9e8))
    loaded = []
    load = common.checkpoint.load_checkpoint
    monkeypatch.setattr(
        common.checkpoint, "load_checkpoint", lambda path: loaded.append(path) or load(path)
    )
    newest = folders[2] / "Epoch_94.pt"
    assert newest_checkpoint(folders) == newest_checkpoint(folders[::-1]) == (newest, [])
    assert loaded == [newest, newest]
    newest.write_bytes(newest.read_bytes()[:-40])  # its time of change is now
    found, [why] = newest_checkpoint(folders)
    assert found == folders[1] / "Epoch_95.pt"
    assert "Epoch_94.pt" in why
    without = tmp_path / "without"
    without.mkdir()
    torch.save(plain, without / "Epoch_1.pt")
    for changed_at, expected in ((2_000, found), (4_000, without / "Epoch_1.pt")):
        os.utime(without / "Epoch_1.pt", (changed_at, changed_at))
        assert newest_checkpoint([*folders[:2], without])[0] == expected


def test_newest_of_nothing_good(saved, tmp_path):
    """No folder, an empty one or only damaged files give None and the reasons."""
    assert newest_checkpoint([]) == (None, [])
    assert newest_checkpoint([tmp_path, tmp_path / "missing"]) == (None, [])
    (tmp_path / "Epoch_1.pt").write_bytes(saved[0][:99])
    found, passed_over = newest_checkpoint([tmp_path])
    assert found is None
    assert "Epoch_1.pt" in passed_over[0]
