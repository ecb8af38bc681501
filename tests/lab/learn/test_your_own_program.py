"""Programs of a student's own, from the lessons' page and from ``lab learn --starter``.

They run, and the audit calls them right.
"""

import os
import re
import shlex
import subprocess
import sys

import pytest

from lab.audit.findings import run_checks
from lab.audit.result import verdict
from lab.cli import main
from tests.helpers import ROOT
from tests.helpers.audited import run_script
from tests.helpers.documentation import Page
from tests.helpers.processes import free_port

PAGE = Page(ROOT / "docs/learn/your_own_program.md")


def write_program(folder):
    """Write the page's program and return its path."""
    [program] = [content for language, content in PAGE.blocks() if language == "python"]
    path = folder / "main_gather.py"
    path.write_text(program)
    return path


def test_the_lessons_lead_to_the_page():
    for lesson in ("03_gather_scatter", "05_ring", "06_overlap"):
        assert "your_own_program.md" in (ROOT / f"docs/learn/{lesson}.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_program_runs_in_two_terminals(tmp_path):
    write_program(tmp_path)
    commands = [line for line in PAGE.commands() if line.startswith("python main_gather.py")]
    assert len(commands) == 2
    started = []
    port = free_port()
    for command in commands:
        words = [sys.executable, *command.split()[1:], "--master-port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
    try:
        printed = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, text in enumerate(printed):
        losses = re.findall(rf"rank {rank} step (\d+) loss (\S+)", text)
        assert [step for step, _ in losses] == ["20", "40"]
        assert float(losses[1][1]) < float(losses[0][1])
        assert re.search(r"mean \d+\.\d ms a step, without the first", text)


@pytest.mark.slow
def test_the_audit_calls_the_program_right(tmp_path):
    """With the page's command, on the numbers of ranks that `lab audit` takes by itself."""
    program = write_program(tmp_path)
    [command] = [line for line in PAGE.commands() if line.startswith("lab audit")]
    words = command.partition(" -- ")[2].replace(program.name, "{script}")
    recordings = [
        run_script(tmp_path / str(size), program.read_text(), command=words, size=size).recording
        for size in (2, 3)
    ]
    checked = run_checks(recordings)
    assert verdict(recordings, checked.findings, checked.properties).answer == "yes"
    assert not checked.findings


# What a student writes in place of each function's last line.
WRITTEN = {
    "write average_by_gather_scatter": """
    rank, size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        arriving = [torch.empty_like(parameter.grad) for _ in range(size)] if rank == 0 else None
        dist.gather(parameter.grad, arriving, dst=0)
        means = [sum(arriving) / size] * size if rank == 0 else None
        dist.scatter(parameter.grad, means, src=0)""",
    "write average_by_all_reduce": """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()""",
    "write in_ddp": "    return DistributedDataParallel(model)",
}


@pytest.fixture
def starter(tmp_path, capsys):
    """Return the folder of a new program, and the audit's words for it."""
    folder = tmp_path / "my homework"
    assert main(["learn", "--starter", str(folder)]) == 0
    return folder, capsys.readouterr().out.partition("lab audit -- ")[2].strip()


def test_the_starter_replaces_no_file(starter, capsys):
    folder, command = starter
    assert {path.name for path in folder.iterdir()} == {"main.py", "model.py"}
    (folder / "main.py").write_text("mine")
    (folder / "model.py").unlink()
    assert main(["learn", "--starter", str(folder)]) == 2
    assert "main.py is there already" in capsys.readouterr().err
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    assert "--sync all_reduce" in command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--steps", "1"], 2, "give --steps 2 or more"),
        (["--batch-size", "2000"], 1, "1437 images a rank make no batch of 2000"),
        (["--steps", "2", "--batch-size", "7"], 0, "1 x 7 = 7 images a step"),
    ],
)
def test_the_starter_ends_with_words_or_a_result(starter, flags, code, words):
    folder, _ = starter
    ended = subprocess.run(
        [sys.executable, "main.py", "--dataset", "digits", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == code
    assert words in ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["gather_scatter", "all_reduce", "ddp"])
def test_the_audit_calls_the_filled_starter_right(starter, sync):
    """With the printed command and fewer steps, in the folder with the course's model.py."""
    folder, command = starter
    program = (folder / "main.py").read_text()
    words = command.replace(shlex.quote(str(folder / "main.py")), "{script}")
    words = words.replace("all_reduce", sync)
    words = words.replace("--steps 6", "--steps 3")
    blanks = {name: f'    raise NotImplementedError("{name}")' for name in WRITTEN}
    for name, text in WRITTEN.items():
        assert program.count(blanks[name]) == 1
        program = program.replace(blanks[name], text)
    recording = run_script(folder, program, command=words, size=3).recording
    checked = run_checks([recording])
    assert verdict([recording], checked.findings, checked.properties).answer == "yes"
    assert not checked.findings
