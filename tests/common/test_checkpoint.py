"""Checkpoints: exact, atomic, verified when read, and unable to run code."""

import io
import os
import pickle
import random
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import common.checkpoint
import common.utils.atomic_files
from common.checkpoint import load_checkpoint, load_model_state, newest_checkpoint, save_checkpoint
from common.errors import UserError
from common.utils.atomic_files import write_atomically
from common.utils.hashing import digest
from lab.proofs import ranks
from tests.helpers import wait_until
from tests.helpers.full_disk import room_for


def _small_model(*, channels=4):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(channels * 4, 5))
    return model.to(memory_format=torch.channels_last)


def _entries():
    """Return a checkpoint's entries after three steps of a channels_last model with momentum."""
    model = _small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return {
        "epoch": 3,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": 1.2345678901234567,
        "schedule": {"steps": [1, 2, [3, 4.5]], "name": "onecycle", "none": None},
        "bf16": torch.randn(3).bfloat16(),
        "empty": torch.empty(0),
        "flag": True,
    }


def _plain(**entries):
    return {"epoch": 1, "loss": 0.0, "model_state_dict": {}, "optimizer_state_dict": {}} | entries


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the bytes of a saved checkpoint and the entries that it must give back."""
    path = tmp_path_factory.mktemp("saved") / "Epoch_3.pt"
    entries = _entries()
    save_checkpoint(path, entries)
    return path.read_bytes(), entries


def _refused(source, **name):
    with pytest.raises(UserError) as error:
        load_checkpoint(source, **name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    return str(error.value)


def test_roundtrip_is_bit_exact(saved, tmp_path):
    """Also of plain values and strides; from a file, and from its bytes."""
    content, entries = saved
    path = tmp_path / "Epoch_3.pt"
    path.write_bytes(content)
    for loaded in (load_checkpoint(path), load_checkpoint(content, name="from rank 0")):
        assert list(loaded) == list(entries)
        assert digest(loaded) == digest(entries)
        weights = [one["model_state_dict"]["0.weight"] for one in (loaded, entries)]
        assert weights[0].stride() == weights[1].stride()


def test_of_a_ddp_model_only_the_leading_prefix_is_removed(tmp_path):
    state = {"weight": torch.ones(1), "inner.module.weight": torch.ones(2)}
    wrapped = {f"module.{name}": value for name, value in state.items()}
    save_checkpoint(tmp_path / "x.pt", _plain(model_state_dict=wrapped))
    assert digest(load_checkpoint(tmp_path / "x.pt")["model_state_dict"]) == digest(state)


def test_digest_sees_every_kind_of_change():
    """Values, bits, types, shapes, names and nesting change the digest; strides do not."""
    a, b = torch.arange(6.0).view(2, 3), [1, 2.0, "x", None, True]
    base = {"a": a, "b": b}
    tensors = (a.view(3, 2), a.double(), a.int(), a.nextafter(torch.tensor(9.0)), -a)
    lists = (
        [1, 2, "x", None, True],
        [1, 2.0, "x", None, 1],
        [1, 2.0, "x", "None", True],
        [1, 2.0, ["x", None], True],
        [1, 2.0, "x", True, None],
    )
    changed = [{"A": a, "b": b}, {"a": a}]
    changed += [base | {"a": tensor} for tensor in tensors] + [base | {"b": one} for one in lists]
    digests = [digest(value) for value in (base, *changed)]
    assert len(set(digests)) == len(digests)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    one = torch.randn(4, 2)[:1, 0]  # a single value with stride 2
    assert digest(one) == digest(torch.tensor(one.tolist()))
    image = torch.randn(2, 3, 4, 4)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last))


def _is_refused(content, entries):
    """Return whether the damaged file is refused; fail unless its entries are exact otherwise."""
    try:
        loaded = load_checkpoint(content, name="damaged")
    except UserError:
        return True
    assert digest(loaded) == digest(entries)
    return False


def _flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_single_flipped_bits(saved):
    """Refused or harmless (in padding); nor may a file pass as one without a digest."""
    content, entries = saved
    chance = random.Random(0)
    places = [chance.randrange(len(content)) for _ in range(200)]
    flipped = [_flipped(content, place, chance.randrange(8)) for place in places]
    assert sum(_is_refused(one, entries) for one in flipped) > 60  # most of it has a meaning

    momentum = entries["optimizer_state_dict"]["state"][1]["momentum_buffer"]
    for tensor in (entries["model_state_dict"]["0.bias"], momentum):
        found = tensor.detach().numpy().tobytes()
        assert content.count(found) == 1
        for place in range(content.index(found), content.index(found) + len(found)):
            for bit in range(8):
                assert _is_refused(_flipped(content, place, bit), entries), (place, bit)

    pickled = range(content.index(b"\x80\x02"), content.index(b"PK\x07\x08"))
    for place in pickled:  # names, shapes, strides, plain values
        assert _is_refused(_flipped(content, place, chance.randrange(8)), entries), place
    begin, directory = content.index(b"sha256"), content.index(b"PK\x01\x02")
    for place in (
        *range(begin, begin + 6),
        *range(pickled.start),
        *range(directory, directory + 62),
        *range(len(content) - 98, len(content)),
    ):
        for bit in range(8):
            _is_refused(_flipped(content, place, bit), entries)


def test_altered_with_the_digest_left_as_it_was(saved, tmp_path):
    """A valid file with a changed entry and the old digest fails its SHA-256."""

    for altered in ("weight", "momentum", "epoch"):
        entries = torch.load(io.BytesIO(saved[0]), weights_only=True)
        momentum = entries["optimizer_state_dict"]["state"][0]["momentum_buffer"]
        entries["model_state_dict"]["0.bias"][0] += 1e-6 * (altered == "weight")
        momentum[0] += 1e-6 * (altered == "momentum")
        entries["epoch"] += altered == "epoch"
        torch.save(entries, tmp_path / "Epoch_3.pt")
        assert "SHA-256" in _refused(tmp_path / "Epoch_3.pt"), altered


class _Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _saved_by_torch(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def test_hostile_pickle_runs_no_code(saved, tmp_path):
    """Also not when checkpoints are ordered by age. At the end pickle.loads runs the code."""
    mark, path = tmp_path / "mark", tmp_path / "Epoch_1.pt"
    hostile = _Touch(mark)
    for entries in (hostile, {**saved[1], "loss": hostile}, {**saved[1], "extra": [hostile]}):
        for content in (
            _saved_by_torch(entries),
            _saved_by_torch(entries, _use_new_zipfile_serialization=False),
            pickle.dumps(entries),
        ):
            path.write_bytes(content)
            assert str(path) in _refused(path)
            assert newest_checkpoint([tmp_path])[0] is None
            assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists()


FOREIGN = {
    "text": lambda entries: b"This is a letter, not a checkpoint.\n" * 50,
    "empty": lambda entries: b"",
    "pickle": lambda entries: pickle.dumps({"epoch": 1}),
    "whole model": lambda entries: _saved_by_torch(nn.Linear(2, 2)),
    "bare state_dict": lambda entries: _saved_by_torch(nn.Linear(2, 2).state_dict()),
    "tensor": lambda entries: _saved_by_torch(torch.ones(4)),
    "no loss": lambda entries: _saved_by_torch({k: entries[k] for k in entries if k != "loss"}),
    "weights are a list": lambda entries: _saved_by_torch(entries | {"model_state_dict": [1, 2]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*FOREIGN, "missing", "folder", "below a file"])
def test_what_is_no_checkpoint_is_refused_in_one_line_with_its_name(kind, saved, tmp_path):
    path = tmp_path / "Epoch_1.pt"
    if kind in FOREIGN:
        path.write_bytes(FOREIGN[kind](saved[1]))
    elif kind == "folder":
        path.mkdir()
    elif kind == "below a file":
        path.write_text("x")
        path /= "Epoch_1.pt"
    assert str(path) in _refused(path)


def test_other_architectures_weights(saved):
    """Another width or number of layers, or a value in place of a tensor: the error names it."""
    loaded = load_checkpoint(saved[0], name="saved")
    wider, deeper = _small_model(channels=5), nn.Sequential(*_small_model(), nn.Linear(5, 5))
    for model, entry in ((wider, "0.weight"), (deeper, "5.weight"), (_small_model()[:2], "4.we")):
        with pytest.raises(UserError, match=rf"Epoch_3\.pt.*another model.*{entry}"):
            load_model_state(model, loaded, name="Epoch_3.pt")
    for value in (1.5, "text", None, [1.0]):
        loaded["model_state_dict"]["0.bias"] = value
        with pytest.raises(UserError, match=r"0\.bias"):
            load_model_state(_small_model(), loaded, name="Epoch_3.pt")


def test_full_disk_leaves_the_old_file(saved, tmp_path):
    """The error names the path; no new file and no temporary one remains."""
    old, new = tmp_path / "Epoch_3.pt", tmp_path / "Epoch_4.pt"
    old.write_bytes(saved[0])
    entries = saved[1] | {"epoch": 4}
    for path, room in ((old, 2000), (old, 0), (new, 5000)):
        with room_for(room), pytest.raises(UserError) as full:
            save_checkpoint(path, entries)
        assert str(path) in str(full.value)
        assert "\n" not in str(full.value)
        assert [entry.name for entry in tmp_path.iterdir()] == ["Epoch_3.pt"]
        assert old.read_bytes() == saved[0]
    with room_for(10**6):
        save_checkpoint(new, entries)
    assert load_checkpoint(new)["epoch"] == 4


@pytest.mark.parametrize("fails", ["nothing", "fsync", "replace"])
def test_the_file_is_synced_then_renamed_then_its_folder_is_synced(fails, tmp_path, monkeypatch):
    """If one fails, as network disks report that they are full, only the old file remains."""
    path, events = tmp_path / "Epoch_1.pt", []
    path.write_bytes(b"old")

    def noted(name):
        original = getattr(os, name)

        def act(*arguments):
            if name == fails:
                raise OSError(28, "No space left on device")
            folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")
            events.append("sync folder" if folder else name)
            original(*arguments)

        return act

    for name in ("fsync", "replace"):
        monkeypatch.setattr(common.utils.atomic_files.os, name, noted(name))
    expected = nullcontext() if fails == "nothing" else pytest.raises(UserError, match="No space")
    with expected:
        write_atomically(path, b"new")
    if fails == "nothing":
        assert events == ["fsync", "replace", "sync folder"]
    assert path.read_bytes() == (b"new" if fails == "nothing" else b"old")
    assert [entry.name for entry in tmp_path.iterdir()] == ["Epoch_1.pt"]


def _save_for_ever(path):
    while True:
        for epoch in (1, 2):
            weights = {"w": torch.full((500_000,), float(epoch))}
            save_checkpoint(path, _plain(epoch=epoch, model_state_dict=weights))


def test_killed_while_saving(tmp_path):
    """Ten processes that save repeatedly are killed; a read meanwhile finds a whole file, too."""
    delays = random.Random(1)
    for turn in range(10):
        path = tmp_path / f"Epoch_{turn}.pt"
        child = ranks.context().Process(target=_save_for_ever, args=(path,), daemon=True)
        child.start()
        try:
            wait_until(path.exists, "the first checkpoint")
            load_checkpoint(path)
            assert child.is_alive()
            time.sleep(delays.uniform(0, 0.05))  # the kill comes at a random moment
        finally:
            child.kill()
            child.join(10)
        loaded = load_checkpoint(path)
        weights = torch.full((500_000,), float(loaded["epoch"]))
        assert torch.equal(loaded["model_state_dict"]["w"], weights)


def test_newest_passes_over_damaged_ones(saved, tmp_path):
    """Of those saved at one time the highest epoch, as a number, then the first folder counts."""
    content = saved[0]
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    for epoch in (2, 9, 10):
        (old / f"Epoch_{epoch}.pt").write_bytes(content)
    assert newest_checkpoint([]) == newest_checkpoint([new]) == (None, [])
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
    """Not by name or time of change; of equal times the higher step, and no time is the oldest."""
    folders = [tmp_path / name for name in ("z-old", "a-new", "m-same-time")]
    saved_at = (1_000.0, 3_000.0, 3_000.0)
    for folder, moment, step in zip(folders, saved_at, (90, 5, 6), strict=True):
        monkeypatch.setattr(common.checkpoint.time, "time", lambda moment=moment: moment)
        save_checkpoint(folder / f"Epoch_{100 - step}.pt", _plain(step=step))
    os.utime(folders[0] / "Epoch_10.pt", (9e8, 9e8))
    load = mock.Mock(side_effect=load_checkpoint)
    monkeypatch.setattr(common.checkpoint, "load_checkpoint", load)
    newest = folders[2] / "Epoch_94.pt"
    assert newest_checkpoint(folders) == newest_checkpoint(folders[::-1]) == (newest, [])
    assert load.call_args_list == [mock.call(newest)] * 2, "verified: nothing but the chosen one"
    newest.write_bytes(newest.read_bytes()[:-40])
    found, [why] = newest_checkpoint(folders)
    assert found == folders[1] / "Epoch_95.pt"
    assert "Epoch_94.pt" in why
    own = tmp_path / "own" / "Epoch_999.pt"
    own.parent.mkdir()
    torch.save(_plain(), own)
    assert newest_checkpoint([own.parent, *folders[:2]])[0] == found
    assert newest_checkpoint([own.parent]) == (own, [])
