"""Parts without a sandbox that root runs as an ordinary user, and what that user cannot do."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from lab.audit.isolation import LOOPBACK, record_folder
from lab.grade import ordinary_user
from lab.grade.sandbox import ordinary_user as user_of_parts
from tests.lab.grade.test_sandbox import small_task

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

# Each line is refused but the last three: its own copy, its records, and a process left behind.
ATTACKS = """\
echo forged >> {grader}/run_autograder && echo done
echo forged > {grader}/results.json && echo done
rm -f {grader}/run_autograder && echo done
mv {grader}/rubric {grader}/other && echo done
ln -s /etc/passwd {grader}/rubric/link && echo done
echo forged > {grader}/rubric/new && echo done
echo forged > {folder}/records/../rank0.log && echo done
kill -KILL {parent} && echo done
echo changed >> {folder}/../submission/main.py && echo own
echo record > {folder}/records/1.jsonl && echo own
(while sleep 0.1; do echo forged > {grader}/late; done) > /dev/null 2>&1 & echo own
"""


@pytest.mark.parametrize("has_namespaces", [True, False], ids=["namespaces", "none"])
def test_the_user_writes_nothing_of_the_grader_and_leaves_nothing(
    monkeypatch, tmp_path, has_namespaces
):
    """The grader's folder can be entered by everybody, as that of Gradescope."""
    if not has_namespaces:
        without = contextlib.nullcontext(LOOPBACK)
        monkeypatch.setattr(ordinary_user, "run_network", lambda *_, **__: without)
    with record_folder(None) as folder:
        grader = folder / "grader"
        (grader / "rubric").mkdir(parents=True)
        (grader / "run_autograder").write_text("mine")
        task = ordinary_user.own_copy(small_task(tmp_path), folder)
        run = folder / "run"
        run.mkdir()
        script = ATTACKS.format(grader=grader, folder=run, parent=os.getpid())
        with ordinary_user.user_network(task, 2, run) as network:
            words = ["setsid", "sh", "-c", script]
            command = [*network.prefixes[0], *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
            assert (network.records / "1.jsonl").read_text() == "record\n"
        assert done.stdout == "own\n" * 3
        for process in psutil.process_iter(["uids", "status"]):
            if process.info["uids"].real == user_of_parts():
                assert process.info["status"] == psutil.STATUS_ZOMBIE
        assert (grader / "run_autograder").read_text() == "mine"
        assert sorted(os.listdir(grader)) == ["rubric", "run_autograder"]
        assert os.listdir(grader / "rubric") == []
    assert (tmp_path / "submission/main.py").read_text() == "mine"


def test_what_the_rubric_provides_has_to_be_readable(tmp_path):
    """Else each script that needs it would be blamed for a module that is missing."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    provided = tmp_path / "starter"
    provided.mkdir()
    (provided / "model.py").write_text("")
    task = small_task(tmp_path, environment={"PYTHONPATH": f"own:{provided}"})
    assert "starter" not in (ordinary_user.refused(task) or "")
    (provided / "model.py").chmod(0o600)
    assert f"cannot read all ({provided}/model.py)" in ordinary_user.refused(task)
