"""Hostile streams and nested code: what has no end, or no line end, is refused in little memory."""

import os
import subprocess
import sys

import pytest

from common.errors import UserError
from lab.audit import isolation
from lab.cli import main
from lab.grade.demands import _argv_names
from lab.plot_style import plt
from lab.report.drawings.svg import save
from tests.helpers import LONG, ROOT, user_environment
from tests.helpers.full_disk import room_for

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
from lab.cli import main
sys.exit(main(sys.argv[1:]))
"""
ENDLESS = {
    "login": "#!/bin/sh\nexec cat /dev/zero\n",
    "errors": "#!/bin/sh\nexec cat /dev/zero >&2\n",
}


def in_little_memory(*words, **options):
    """Run a command of the lab that may allocate 1 GiB; return its exit status and its errors."""
    command = [sys.executable, "-c", LIMITED, *map(str, words)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONG, **options
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("ssh", ENDLESS)
def test_a_host_that_sends_without_end_is_left(tmp_path, ssh):
    fake = tmp_path / "bin/ssh"
    fake.parent.mkdir()
    fake.write_text(ENDLESS[ssh])
    fake.chmod(0o755)
    environment = user_environment()
    environment["PATH"] = f"{fake.parent}:{environment['PATH']}"
    words = ["launch", "--hosts", "a", "--logs", tmp_path / "logs", "--", "true"]
    status, errors = in_little_memory(*words, env=environment)
    assert status not in (0, -9), errors
    assert "Traceback" not in errors
    assert ("its login printed more than" in errors) == (ssh == "login"), errors


def test_a_log_without_an_end_is_refused():
    status, errors = in_little_memory("explain", "/dev/zero")
    assert (status, "Traceback" in errors) == (2, False), errors
    assert "more than 268,435,456 bytes" in errors


def test_a_log_may_come_through_a_pipe(capsys):
    """As ``lab explain <(kubectl logs ...)`` gives it."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"RuntimeError: CUDA out of memory\n")
    os.close(write_end)
    assert main(["explain", f"/dev/fd/{read_end}"]) == 0
    os.close(read_end)
    assert "memory" in capsys.readouterr().out


COMMANDS = {
    "lab": ["-m", "lab", "explain", "job.log"],
    "lab's help": ["-m", "lab", "explain", "--help"],
    "a part": [ROOT / "PartOne/main.py", "--print-config"],
    "a part, unbuffered": ["-u", ROOT / "PartOne/main.py", "--print-config"],
}
PLACES = {
    "closed": ("exec >&-", 0, ""),
    "full": ("exec > /dev/full", 1, "error: the output could not be written (No space left"),
    "left": ("exec > >(:); wait $!", 1, ""),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the status and errors of each command in each place; all start at once."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "job.log").write_text("RuntimeError: CUDA out of memory\n")
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    started = {}
    for name, words in COMMANDS.items():
        for place, (how, *_) in PLACES.items():
            started[name, place] = subprocess.Popen(
                ["bash", "-c", f'{how}; exec "$@"', "bash", sys.executable, *words],
                stderr=subprocess.PIPE,
                cwd=folder,
                env=environment,
                text=True,
            )
    found = {}
    for key, process in started.items():
        with process:
            errors = process.communicate(timeout=LONG)[1]
            found[key] = process.returncode, errors
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_is_closed_full_or_left(name, place, ended):
    _, expected, words = PLACES[place]
    status, errors = ended[name, place]
    assert status == expected, errors
    assert errors.startswith(words)
    assert len(errors.splitlines()) == (1 if words else 0)


NEXT_FILE = """
import os, sys
from common.utils.streams import standard_streams
with standard_streams():
    with open("next", "w") as file:
        print("lost")
        os.system("echo lost; echo lost >&2")
        file.write("whole")
"""


def test_a_file_does_not_take_the_number_of_a_closed_stream(tmp_path):
    """Else what a child prints goes into the file."""
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", NEXT_FILE]
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=LONG).returncode == 0
    assert (tmp_path / "next").read_text() == "whole"


def test_another_encoding_than_utf_8_changes_words_alone():
    """The µ of a latency becomes an escape, and the project's own tables are read."""
    words = "predict --nodes 2 --rate 1gbit --latency 30us --step-time 99ms --parameters 9m"
    environment = user_environment() | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "lab", *words.split(), "--batch", "32"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert ended.returncode == 0, ended.stderr
    assert r"\xb5s" in ended.stdout


def test_names_of_hosts_in_any_encoding_are_kept(tmp_path, monkeypatch):
    of_system = tmp_path / "of_system"
    of_system.write_bytes(b"127.0.0.1 localhost  # B\xfcro\n")
    monkeypatch.setattr(isolation, "HOSTS", of_system)
    written = isolation.write_hosts(tmp_path, "10.0.0.1", ["a"]).read_bytes()
    assert written == b"10.0.0.1 a\n" + of_system.read_bytes()


def test_a_figure_that_does_not_fit_leaves_the_earlier_one(tmp_path, capsys):
    """One of a prediction, and one of a report."""
    predicted, reported = tmp_path / "a.png", tmp_path / "b.png"
    for figure in (predicted, reported):
        figure.write_text("earlier")
    with room_for(1000):
        assert main(["predict", "--nodes", "2", "--figure", str(predicted)]) == 2
        assert f"{predicted} could not be written" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"b\.png could not be written"):
            save(plt.figure(), tmp_path / "b")
    assert sorted(tmp_path.iterdir()) == [predicted, reported]
    assert {figure.read_text() for figure in (predicted, reported)} == {"earlier"}


@pytest.mark.parametrize(
    "code",
    ["x = " + "(" * 100_000, "x = " + "-" * 5_000 + "1", "x = " + "+".join("1" * 50_000), "\0"],
)
def test_code_that_is_nested_too_deeply_names_no_arguments(code):
    assert _argv_names(code) == {}


def test_what_stands_before_deep_code_is_still_read():
    code = "import sys\nport = sys.argv[2]\n"
    assert _argv_names(code) == {2: "port"}
    assert _argv_names(code + "x = " + "-" * 900 + "1") == {2: "port"}
