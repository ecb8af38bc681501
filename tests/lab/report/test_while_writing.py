"""``lab report`` and ``lab compare`` beside a process that writes the same files."""

import re
import shutil

import pytest

from common.errors import UserError
from common.reporting.run_lock import lock_folder
from common.runs import read_steps
from lab.compare.reporting import compare_and_report, report_on
from lab.compare.runner import open_comparison
from lab.compare.settings import Settings
from tests.helpers import TINY, make_image_folder, run_part, start_part


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the flags of a run of 60 epochs, two steps each, and its folder."""
    folder = tmp_path_factory.mktemp("while-writing")
    images = make_image_folder(folder / "images")
    flags = [
        *(*TINY, "--dataset", "folder", "--data-dir", images, "--batch-size", 12, "--threads", 1),
        *("--epochs", 60, "--log-every", 1, "--output-dir", folder, "--run-name", "same"),
    ]
    return flags, folder / "PartOne-none" / "same"


def report_until_end(writer, run, reports):
    """Report again and again while ``writer`` runs; return each refusal, "" for a report."""
    words = []
    while writer.process.poll() is None:
        try:
            assert report_on([run], reports=reports, scaling="strong") == 0
            words.append("")
        except UserError as error:
            words.append(str(error))
    assert writer.end().status == 0
    return words


@pytest.mark.slow
def test_reports_of_a_run_that_is_writing(written, tmp_path):
    """Before a run's first part has ended there is no report; then always the last whole one."""
    flags, run = written
    first = start_part("PartOne", *flags, "--stop-after-epoch", 1, cwd=tmp_path)
    for refusal in filter(None, report_until_end(first, run, tmp_path)):
        assert re.search("has not finished|is not the folder of a run", refusal), refusal
    second = start_part("PartOne", *flags, "--resume", "auto", cwd=tmp_path)
    words = report_until_end(second, run, tmp_path)
    assert words
    assert set(words) == {""}, words
    assert len(read_steps(run)) == 120


def test_a_line_that_is_not_whole_is_left_out(written, tmp_path):
    """A writer may be between the two halves of a line."""
    flags, folder = written
    if not (folder / "summary.json").exists():
        assert run_part("PartOne", *flags, cwd=tmp_path)[0].status == 0
    run = shutil.copytree(folder, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"epoch": 61, "st')
    assert len(read_steps(run)) == 120
    assert report_on([run], reports=tmp_path, scaling="strong") == 0


def test_a_comparison_is_resumed_by_one_process_at_a_time(tmp_path):
    settings = Settings(nodes=(1,), sync=("none",), steps=2, warmup=1, repeats=1)
    folder, _ = open_comparison(settings, reports=tmp_path, command="lab compare")
    with (
        lock_folder(folder, advice=""),
        pytest.raises(UserError, match=rf"{folder} is in use by process \d+ on .* --new"),
    ):
        compare_and_report(
            settings, reports=tmp_path, anew=False, predicts=False, command="lab compare"
        )
    assert {path.name for path in folder.iterdir()} == {"results.json"}
