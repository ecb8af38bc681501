"""Folders that cannot be written, and truncated, altered or hostile checkpoints."""

import os
import pickle
import random
import shutil
import subprocess
import sys

import pytest
import torch

from common.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from common.utils.atomic_files import remove_unfinished, write_atomically
from common.utils.hashing import digest
from tests.helpers import ROOT, run_part
from tests.helpers.stage import QUICK, assert_equal_runs, assert_told

PLACES = 100
LAST_RECORD_BYTES = 22  # a zip file's end record, which repeats numbers from its table of contents


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    flags = (*QUICK, "--output-dir", tmp_path / "file" / "reports")
    for ended in run_part("PartTwo", *flags, cwd=tmp_path, ranks=2):
        assert_told(ended, r"file/reports.* \(Not a directory\): give another --output-dir")


def test_a_checkpoint_cut_at_100_random_places_is_never_trusted(tmp_path):
    """A crash leaves zeros if the last blocks were never written.

    Zeros only in the archive's last record may pass; every entry must then match by SHA-256.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    places = random.Random(seed)
    last, moving = tmp_path / "Epoch_3.pt", {0: {"momentum_buffer": torch.randn(64, 32)}}
    for epoch in (1, 2, 3):
        saved = {"weight": torch.randn(64, 32), "bias": torch.zeros(64)}
        saved = {"model_state_dict": saved, "optimizer_state_dict": {"state": moving}}
        save_checkpoint(tmp_path / f"Epoch_{epoch}.pt", saved | {"epoch": epoch, "loss": 0.5})
    whole, entries = last.read_bytes(), digest(load_checkpoint(last))
    in_last_record = range(len(whole) - LAST_RECORD_BYTES, len(whole))
    for place in [*(places.randrange(len(whole)) for _ in range(PLACES)), *in_last_record]:
        for damaged in (whole[:place], whole[:place] + bytes(len(whole) - place)):
            last.write_bytes(damaged)
            found, passed_over = newest_checkpoint([tmp_path])
            if found == last and len(damaged) == len(whole) and place in in_last_record:
                assert digest(load_checkpoint(found)) == entries
            elif damaged != whole:
                told = f"seed {seed}, cut at {place} of {len(whole)}"
                assert found == tmp_path / "Epoch_2.pt", told
                assert len(passed_over) == 1
                assert "Epoch_3.pt" in passed_over[0]


class Hostile:
    """An object that runs a command when unpickled; the command creates a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.slow
def test_a_run_passes_over_a_hostile_and_a_cut_checkpoint(stage, undisturbed):
    run, mark = stage.run(), stage.folder / "mark"
    shutil.copytree(undisturbed("all_reduce"), run)
    for result in ("summary.json", "report.json", "report.txt"):
        (run / result).unlink()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"epoch": 2, "st')  # a line cut off by a full disk
    second = run / "checkpoints" / "Epoch_2.pt"
    second.write_bytes(second.read_bytes()[: -random.randrange(1, 1_000_000)])
    torch.save(
        load_checkpoint(run / "checkpoints" / "Epoch_1.pt") | {"loss": Hostile(mark)},
        run / "checkpoints" / "Epoch_3.pt",
    )
    (run / "checkpoints" / "Epoch_4.pt").write_bytes(pickle.dumps(Hostile(mark)))
    stage.finish("all_reduce", "--resume", "auto")
    assert not mark.exists(), "code from a checkpoint ran"
    for name in ("Epoch_4", "Epoch_3", "Epoch_2"):
        assert f"{name}.pt is " in stage.text(0), "each that is passed over is named"
    assert "Epoch_1.pt, step 2" in stage.text(0)
    for name in ("Epoch_3.pt", "Epoch_4.pt"):
        (run / "checkpoints" / name).unlink()
    assert_equal_runs(run, undisturbed("all_reduce"))


WRITE_HALF = """
import sys
from pathlib import Path
from common.utils.atomic_files import _open_unfinished
file = _open_unfinished(Path(sys.argv[1]))
file.write(b"half")
file.flush()
print("written", flush=True)
sys.stdin.read()
"""


def test_what_killed_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path):
    def start(name):
        command = [sys.executable, "-c", WRITE_HALF, tmp_path / name]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        writer = subprocess.Popen(command, **pipes, text=True, cwd=ROOT)
        assert writer.stdout.readline() == "written\n"
        return writer

    (tmp_path / ".Epoch_5.pt.of-somebody-else").write_text("stays")
    with start("Epoch_1.pt") as dead, start("Epoch_2.pt") as living:
        dead.kill()
        dead.wait(30)
        assert len(list(tmp_path.glob("*.unfinished"))) == 2
        remove_unfinished(tmp_path)
        [left] = tmp_path.glob("*.unfinished")
        assert left.name.startswith(".Epoch_2.pt.")
        living.kill()
        living.wait(30)
    write_atomically(tmp_path / "Epoch_3.pt", b"whole")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".Epoch_5.pt.of-somebody-else", "Epoch_3.pt"]
