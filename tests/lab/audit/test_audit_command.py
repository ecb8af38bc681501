"""``lab audit`` as users call it: what starts the ranks, exit statuses and files."""

import json
import platform
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from lab.audit.cases import FOLDER, STARTER_CODE
from lab.audit.like import kept_recordings
from tests.helpers.audited import BY_FLAGS, CASES


@pytest.mark.slow
def test_a_right_script_and_its_json(tmp_path, audit):
    right = str(FOLDER / "right_ddp.py")
    words = [right if word == "{script}" else word for word in BY_FLAGS.split()]
    files = ("--json", "a.json", "--html", "a.html")
    status, out, _ = audit(*files, "--keep", "kept", "--", *words)
    assert status == 0, out
    assert out.startswith("Right: no fault in ")
    flat, version = " ".join(out.split()), platform.python_version()
    assert f"Watched 20 steps in 2 epochs on 2 and 3 ranks, with Python {version} (" in flat
    assert "gradients: yes — the ranks start equal" in flat
    assert "each epoch covers the dataset once (240 samples)" in flat
    assert len(out.splitlines()) < 50
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["status"] == 0
    assert content["replay"] is None
    assert {finding["severity"] for finding in content["findings"]} <= {"notice"}
    assert [run["ranks"] for run in content["runs"]] == [2, 3]
    assert "<html" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["2-ranks", "3-ranks"]


@pytest.mark.slow
def test_torchrun_gets_the_number_of_ranks_and_a_literal_divisor_is_a_fault(tmp_path, audit):
    right = (CASES / "right_torchrun.py").read_text()
    divided = "for p in self.model.parameters():\n            p.grad /= 4"
    (tmp_path / "train.py").write_text(
        right.replace("loss.backward()", f"loss.backward()\n        {divided}")
    )
    status, out, _ = audit("--ranks", 3, "--", "torchrun", "--nproc-per-node", 2, "train.py")
    assert status == 1, out
    assert out.startswith("Wrong: gradients are divided by a constant, not by")
    assert "gradients: no.\n" in out
    assert "FAULT: Gradients are divided by a constant" in out


@pytest.mark.slow
def test_a_script_that_starts_its_own_ranks_runs_once(audit):
    status, out, _ = audit("--", "python", f"{CASES}/right_data_partitioner.py", 2, "{port}")
    assert status == 0, out
    assert "fixes its number of ranks at 2" in out
    assert "3 ranks" not in out


@pytest.mark.slow
def test_groups_of_ranks_are_to_be_audited_where_there_are_several(tmp_path, audit):
    for script in (STARTER_CODE, CASES / "right_hierarchical.py"):
        shutil.copy(script, tmp_path)
    words = BY_FLAGS.replace("{script}", "right_hierarchical.py").split()
    status, out, _ = audit("--ranks", 2, "--", *words)
    assert (status, "--ranks 4 6" in out) == (0, True), out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command: add it after --"),
        ("train.py", "Type: lab audit -- python train.py. Add the script's flags, with {rank}"),
        ("--ranks 2 train.py {rank}", "Type: lab audit --ranks 2 -- python train.py {rank}"),
        ("--json a.json torchrun --nproc-per-node 2 train.py", "a.json -- torchrun --nproc-per"),
        ("-- train.py --rank {rank}", "Type: lab audit -- python train.py --rank {rank}"),
        ("--ranks 1 -- python train.py {rank}", "--ranks: got 1"),
        ("--ranks 2 999 -- python train.py {rank}", "--ranks: got 999; this machine has"),
        ("--steps 0 -- python train.py {rank}", "--steps: got 0; give more than 0"),
        ("--global-batch -1 -- python train.py", "--global-batch: got -1; give more than 0"),
        ("--timeout nan -- python train.py", "--timeout: got nan; give more than 0"),
        ("--json no/such/file -- python train.py", "--json: no/such/file cannot be written"),
        ("--keep . -- python train.py", "--keep: . is not an empty folder: give a new one"),
        ("--rate 1gbit -- python train.py", "give {rank} in the command"),
        ("--rate 1gbit --isolate -- python x {rank}", "give one of them"),
        ("-- python train.py {ranks}", "unknown placeholder {ranks}"),
        ('--rank0 "python \'t.py" -- python t.py {rank}', "--rank0: No closing quotation"),
        ("--rank0 '' -- python t.py {rank}", "--rank0: got an empty command"),
        ("--rank0 'python {me}' -- python t.py {rank}", "unknown placeholder {me}"),
        ("--rank0 'python m.py' -- torchrun t.py", "--rank0: the command after -- starts"),
        ("-- no-such-program {rank}", "no-such-program cannot be started: there is no such"),
        *(
            pytest.param(f"-- {words}", message, marks=pytest.mark.slow)
            for words, message in (
                ("ls", "the audit could not enter any Python process"),
                ("python -I train.py {rank}", "without -I, -E or -S"),
                ("python -c input() {rank}", "The script reads stdin"),
                ("python -c 1/0 {rank}", "status 1: ZeroDivisionError: division by zero. First"),
                ("python -c pass {rank}", "before any torch.optim optimiser took a step"),
                ("python no.py {rank}", "cd to the folder"),
            )
        ),
    ],
)
def test_what_cannot_be_audited_is_told_on_one_line(tmp_path, refusal, words, message):
    (tmp_path / "train.py").touch()
    assert message in refusal(*shlex.split(words))


def test_a_program_of_an_environment_that_is_not_active_is_named(monkeypatch, refusal):
    monkeypatch.setenv("PATH", "/nowhere")
    told = refusal("--", "torchrun", "train.py")
    assert "not on the PATH" in told
    assert str(Path(sys.executable).with_name("torchrun")) in told


WRONG_SCRIPTS = {  # by what the script lacks: its code, the line and the known error
    "rank": ("import os\ndef f():\n    os.environ['RANK']\nf()", 3, "no_environment"),
    "class": (
        "import torch\nclass Features: pass\ntorch.save(Features(), FILE)\ntorch.load(FILE)",
        4,
        "weights_only",
    ),
    "folder": ("import sys\nopen('output/log.txt', 'w')", 2, "output_folder_missing"),
    "scheme": (
        "import torch.distributed as dist\ndist.init_process_group('gloo', init_method='10.0.0.1')",
        2,
        "address_without_scheme",
    ),
    "child": (
        "from torch.multiprocessing import spawn\ndef f(rank):\n    raise KeyError('lr')\n"
        "if __name__ == '__main__':\n    spawn(f, nprocs=1)",
        3,
        None,
    ),
    "helper": ("import sys\nimport helper", None, "syntax_error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("lack", WRONG_SCRIPTS)
def test_the_scripts_own_line_and_the_known_error_are_in_the_json(tmp_path, audit, lack):
    code, number, known = WRONG_SCRIPTS[lack]
    (tmp_path / "train.py").write_text(
        code.replace("FILE", "'features-' + __import__('sys').argv[1]")
    )
    (tmp_path / "helper.py").write_text("def f():\nreturn 1\n")
    command = ("--", "python", "train.py", "{rank}")
    status, _, error = audit("--ranks", 2, "--json", "a.json", *command)
    assert status == 2, error
    content = json.loads((tmp_path / "a.json").read_text())
    told = content["diagnosis"]
    place = {"file": "helper.py", "line": 2, "text": "return 1"}
    if number is not None:
        place = {"file": "train.py", "line": number, "text": code.splitlines()[number - 1].strip()}
        place["text"] = place["text"].replace("FILE", "'features-' + __import__('sys').argv[1]")
    assert told["at"] == place
    assert told["known_error"] == known
    assert content["failure"] == content["headline"]
    assert told["reason"] in error
    assert "\x1b" not in error + content["failure"]
    assert "[1m" not in error + content["failure"]


@pytest.mark.slow
def test_a_right_script_to_compare_with_runs_in_place_of_the_audited_one(tmp_path, audit):
    """What differs is told, and changes no status; the records can be compared with again."""
    right = FOLDER / "right_ddp.py"
    shutil.copy(STARTER_CODE, tmp_path)
    (tmp_path / "train.py").write_text(right.read_text().replace("lr=0.05", "lr=0.5"))
    words = ["train.py" if word == "{script}" else word for word in BY_FLAGS.split()]
    files = ("--json", "a.json", "--html", "a.html", "--keep", "kept")
    status, out, _ = audit("--ranks", 2, "--like", right, *files, "--", *words)
    assert (status, f"Compared with {right} on 2 ranks:" in " ".join(out.split())) == (0, True), out
    likeness = json.loads((tmp_path / "a.json").read_text())["likeness"]
    found = {one["what"]: one for one in likeness["differences"]}
    rates = found["learning rate"]
    assert (rates["here"], rates["there"]) == ("0.5", "0.05")
    assert "train.py:" in rates["here_at"]
    assert "right_ddp.py:" in rates["there_at"]
    assert found.keys() <= {"learning rate", "change of the weights in a step"}
    assert (
        "learning rate, on 2 ranks:\nhere  0.5, at train.py:" in (tmp_path / "a.html").read_text()
    )
    assert [run.size for run in kept_recordings(tmp_path / "kept/like")] == [2]
