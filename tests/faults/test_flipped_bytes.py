"""Flipped bytes in the files of a run: lab report and --resume say so in one message.

They may also notice nothing, where the bytes still mean something; but they end with a status that
they document, without a traceback.
"""

import random
import shutil
from pathlib import Path

import pytest

from lab.cli import main
from tests.helpers import TINY, make_image_folder, run_part

READ_BY_REPORT = (
    "config.json environment.json metrics.jsonl epochs.jsonl summary.json ranks.json timeline.json "
    "report.json"
).split()
READ_BY_RESUME = ("config.json", "metrics.jsonl", "epochs.jsonl", "checkpoints/Epoch_2.pt")
FLAGS = (*TINY, "--dataset", "folder", "--batch-size", 12, "--log-every", 1, "--run-name", "run")
SEEDS = {"slow": range(3), "long": range(3, 40)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train two epochs on two ranks, and return the folder above data/ and out/."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*FLAGS, "--data-dir", make_image_folder(folder / "data"), "--epochs", 2]
    flags += ["--sync", "all_reduce", "--timeline", "--output-dir", folder / "out"]
    for ended in run_part("PartTwo", *flags, cwd=folder, ranks=2):
        assert ended.status == 0, ended
    return folder


def flip_bytes(path, seed):
    """Change one to eight random bytes of a file."""
    chance, content = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] ^= chance.randint(1, 255)
    path.write_bytes(content)


SEED = [
    pytest.param(seed, marks=getattr(pytest.mark, mark))
    for mark, seeds in SEEDS.items()
    for seed in seeds
]


@pytest.mark.parametrize("seed", SEED)
def test_report_on_flipped_bytes(trained, tmp_path, seed, capsys):
    for name in READ_BY_REPORT:
        run = tmp_path / name / "run"
        shutil.copytree(trained / "out" / "PartTwo-all_reduce" / "run", run)
        flip_bytes(run / name, seed)
        status = main(["report", str(run), "--output-dir", str(tmp_path / "reports")])
        said = capsys.readouterr().err
        assert status in (0, 1, 2), name
        assert "Traceback" not in said, name
        if status:
            assert said.count("error:") == 1, said
            assert "run" in said, said


@pytest.mark.parametrize("seed", SEED)
def test_resuming_on_flipped_bytes(trained, tmp_path, seed):
    for name in READ_BY_RESUME:
        folder = tmp_path / Path(name).name
        shutil.copytree(trained, folder)
        run = folder / "out" / "PartTwo-all_reduce" / "run"
        flip_bytes(run / name, seed)
        flags = [*FLAGS, "--data-dir", folder / "data", "--epochs", 3, "--resume", "auto"]
        flags += ["--sync", "all_reduce", "--output-dir", folder / "out"]
        for ended in run_part("PartTwo", *flags, cwd=folder, ranks=2):
            assert ended.status in (0, 1), (name, ended)
            assert "Traceback" not in ended.err, (name, ended)
            assert ended.status == 0 or ended.err.count("error") >= 1, (name, ended)
