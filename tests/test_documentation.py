"""The pages: their commands run in an empty clone, links lead somewhere, and no page is too long.

``CHECKS`` says for each command of a page how it is checked. A command without an entry fails.
"""

import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from common.models import MODELS
from lab.cluster import tools
from lab.report.drawings.figure_pages import FIGURES
from tests.helpers import ROOT, Started, needs_cifar10, user_environment
from tests.helpers.cluster import needs_namespaces
from tests.helpers.documentation import pages, with_copies
from tests.helpers.documented_commands import CHECKS, Elsewhere, checks_of, pattern_of
from tests.helpers.paths import copy_clone

PAGES = {page.name: page for page in pages()}
MOST_LINES, MOST_LINES_ELSEWHERE = 150, 170  # of 100 columns
PLACES = {"{master}": "10.0.0.1", "{nodes}": "4", "{rank}": "0", "{port}": "29500"}
PLACES |= {"IP": "10.0.0.1", "N": "4", "R": "0"}
INSTALLED = {"part-one": "PartOne", "part-two": "PartTwo", "part-three": "PartThree"}
LIMIT_SECONDS = {"quick": 120, "slow": 280, "long": 3600}

# What code outside this project may import, in addition to what the pages show.
CONTRACT = """
from common.training import get_model_parameters, prepare_model_for_training, train_model
from common.evaluation import prepare_model_for_evaluation, evaluate_model, generate_eval_report
from common.training_engine import TrainingEngine
from common.training_engine import distributed_train_worker, launch_distributed_training
from common.sync.base import GradientSync
from common.sync import STRATEGIES, build_sync
from common.models import MODELS, build_model
from common.data import DATASETS, load_dataset
"""

# --- commands ---


def documented():
    """Return every command once, in the order of the pages."""
    return list(dict.fromkeys(line for page in PAGES.values() for line in page.commands()))


def checks():
    """Return a parameter set (command, check) for each time that a command runs."""
    found = []
    for command in documented():
        for check in checks_of(command):
            if isinstance(check, Elsewhere):
                continue
            marks = [] if check.tier == "quick" else [getattr(pytest.mark, check.tier)]
            marks += [pytest.mark.timeout(LIMIT_SECONDS[check.tier] + 20)]
            marks += [pytest.mark.cifar, needs_cifar10] if check.cifar else []
            emulated = re.search(r" --rate | cluster |^ip ", command)
            marks += [needs_namespaces] if emulated else []
            name = f"{check.tier}: {command} {check.more}".strip()
            found.append(pytest.param(command, check, marks=marks, id=name))
    return found


def test_every_command_of_the_pages_has_an_entry_and_every_entry_a_command():
    used = {command: pattern_of(command) for command in documented()}
    assert [command for command, pattern in used.items() if pattern is None] == []
    assert set(CHECKS) - set(used.values()) == set(), "no page has these"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a folder with the files of a clone, an environment, and nothing else.

    The files are those that git would commit now. The environment is this one, by links.
    """
    folder = tmp_path_factory.mktemp("clone")
    copy_clone(folder)
    environment = folder / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".ready":
            (environment / entry.name).symlink_to(entry.resolve())
    (environment / ".ready").touch()  # so that make does not install anything
    if (ROOT / "data").exists():
        (folder / "data").symlink_to(ROOT / "data")
    for rank in range(3):
        log = "peer_gone-killed.txt" if rank == 0 else "store_gone.txt"
        shutil.copy(ROOT / "tests/lab/explain/logs" / log, folder / f"rank{rank}.txt")
    return folder


@pytest.mark.parametrize(("command", "check"), checks())
def test_the_command_runs_in_an_empty_clone(command, check, clone):
    environment = user_environment(
        PATH=f"{clone}/.venv/bin:{os.environ['PATH']}", PYTHONPATH=str(clone), NO_COLOR="1"
    )
    typed = ["bash", "-c", f"{command} {check.more}"]
    ended = Started(typed, cwd=clone, env=environment).end(
        timeout_seconds=LIMIT_SECONDS[check.tier]
    )
    assert ended.status in check.statuses, f"{ended.out[-3000:]}\n{ended.err[-3000:]}"
    assert re.search(check.prints, ended.out), f"no {check.prints!r} in\n{ended.out[-3000:]}"


@pytest.mark.parametrize("command", documented())
def test_the_flags_of_the_command_exist(command, monkeypatch, capsys):
    """Also for commands that no test can run: every program of the project parses its flags."""
    words = shlex.split(command)
    targets = re.findall(r"^Makefile|^[a-z-]+(?=:)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] != "make" or words[1] in targets
    for word in words:
        if re.match(r"(launch|docs|benchmarks|tests|common)/[\w/.-]+$", word):
            assert (ROOT / word).exists(), word
    parse([PLACES.get(word, word) for word in words], monkeypatch)


def test_the_flags_of_inline_commands_exist(monkeypatch):
    found = [
        code
        for page in PAGES.values()
        for code in re.findall(r"`((?:python|torchrun) [^`…]*Part\w+/main.py[^`…]*)`", page.prose())
    ]
    assert len(found) >= 8
    for code in found:
        parse([PLACES.get(word, word) for word in shlex.split(code)], monkeypatch)


def parse(words, monkeypatch):
    """Let each program of the project that is in ``words`` parse its arguments."""
    if "torchrun" in words:
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*words[words.index("torchrun") + 1 :]])
    for place, word in enumerate(words):
        after = words[place + 1 :]
        if word == "lab" and after and (place == 0 or words[place - 1] == "-m"):
            from lab.cli import build_parser

            end = after.index("--") if "--" in after else len(after)
            build_parser().parse_args(after[:end])
            return parse(after[end + 1 :], monkeypatch)
        part = re.fullmatch(r"(Part\w+)/main\.py", word)
        name = part[1] if part else INSTALLED.get(word)
        if word == "common.cli":
            name, after = after[0], after[1:]
        if name and "--help" not in after:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", [f"{name}/main.py", *after, "--print-config"])
                with pytest.raises(SystemExit) as ended:
                    runpy.run_path(str(ROOT / name / "main.py"), run_name="__main__")
            assert ended.value.code in (0, None), words
    return None


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_what_the_code_says(name, monkeypatch):
    """If this is meant to differ, ``python -m tests.helpers.documentation`` rewrites the pages."""
    monkeypatch.chdir(ROOT)
    assert with_copies(PAGES[name].text) == PAGES[name].text


def test_the_hierarchy_gives_the_numbers_of_its_page(capsys):
    runpy.run_path(str(ROOT / "docs/examples/hierarchy.py"))
    assert f"```text\n{capsys.readouterr().out}```" in PAGES["benchmarks/scaling.md"].text


@pytest.mark.parametrize("task_flag", ["", "wrong"])
def test_the_script_of_the_functions_runs(task_flag, tmp_path, monkeypatch, capsys):
    """With a small model in place of VGG-11; `my_training.py` runs whole in the slow tests."""
    script = str(ROOT / "docs/examples/my_training.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODELS, "vgg11", "tests.helpers.tiny_model:tiny")
    monkeypatch.setattr(sys, "argv", [script, *filter(None, [task_flag])])
    if task_flag:
        with pytest.raises(Exception, match="task_flag: got 'wrong', give a strategy's name"):
            runpy.run_path(script, run_name="__main__")
        return
    runpy.run_path(script, run_name="__main__")
    out = capsys.readouterr().out
    assert "1,530 parameters" in out
    assert "Epoch: 2, Train Loss: " in out
    correct = int(re.search(r"(\d+) of 360 test images are right", out)[1])
    assert correct > 72, "twice chance"
    assert f"({correct} of 360)" in (tmp_path / "reports/functions/report.txt").read_text()


# --- pages ---


def test_no_page_is_too_long():
    lengths = {name: len(page.text.splitlines()) for name, page in PAGES.items()}
    read_by_users = ("README.md", "docs/", "benchmarks/")
    limits = {
        name: MOST_LINES if name.startswith(read_by_users) else MOST_LINES_ELSEWHERE
        for name in lengths
    }
    assert {name: lines for name, lines in lengths.items() if lines > limits[name]} == {}


def test_the_readme_or_the_page_of_the_assignment_links_every_page():
    linked = re.findall(r"\]\(docs/([\w-]+\.md)", PAGES["README.md"].text)
    linked += re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/assignment.md"].text)
    assert set(linked) == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_readme_sends_a_student_to_three_pages():
    row = re.search(r"^\| a student \|.*", PAGES["README.md"].text, re.MULTILINE)[0]
    assert re.findall(r"\]\(docs/([^)]+)\)", row) == [
        "learn/01_one_process.md",
        "learn/gallery.md",
        "assignment.md",
    ]


def test_the_assignment_s_page_leads_from_an_empty_folder_to_the_report():
    """Ten steps, every way on two and on four nodes, and figures that a report draws."""
    page = PAGES["docs/assignment.md"]
    numbers = [int(number) for number in re.findall(r"^\*\*(\d+)\. ", page.text, re.MULTILINE)]
    assert numbers == list(range(1, 11))
    by_hand = [line for line in page.commands() if "--run-name" in line and "10.10.1.1" in line]
    ways = {re.sub(r"-[24] | --num-nodes [24]", " ", command) for command in by_hand}
    assert len(ways) == 3
    assert len(by_hand) == len(set(by_hand)) == 2 * len(ways)
    figures = re.findall(r"`(\w+)\.png`", page.text)
    assert {"loss", "iterations", "step_time", "ranks"} <= set(figures) <= set(FIGURES)


def test_a_short_run_of_the_assignment_leaves_out_the_evaluation_of_10000_images():
    short = [line for line in documented() if "cs744" in line and "--max-steps" in line]
    assert short
    assert [line for line in short if "--measure-only" not in line] == []


NODE_WITH_TWO_NETWORKS = """
ip link set lo up
for network in eno1:128.105.144.71/22 eno1d1:10.10.1.1/24; do
  name=${network%:*}
  ip link add $name type bridge
  ip link add to-$name type veth peer name of-$name
  ip link set of-$name master $name
  for link in $name of-$name to-$name; do ip link set $link up; done
  ip address add ${network#*:} dev $name
done
ip -4 -br addr
"$0" -c "
from argparse import Namespace
from lab.doctor.network import check_interface
print(check_interface(Namespace(master_ip='10.10.1.1', rank=0)).text)"
"""


@needs_namespaces
def test_a_node_with_two_networks_shows_the_addresses_of_the_page():
    """As CloudLab's nodes have them; and `lab doctor` finds the interface of the private one."""
    typed = [*tools.unshare_command(), "bash", "-ec", NODE_WITH_TWO_NETWORKS, sys.executable]
    ended = Started(typed, cwd=ROOT, env=user_environment()).end(timeout_seconds=30)
    page = PAGES["docs/running.md"].text
    shown = re.search(r"ip -4 -br addr\n```\n(?:.*\n)*?```text\n((?:.*\n)*?)```", page)[1]
    *listed, routed = ended.out.splitlines()
    addresses = [line.split()[::2] for line in shown.splitlines()]
    assert [line.split()[::2] for line in listed] == addresses, ended.err
    assert addresses[2] == ["eno1d1", "10.10.1.1/24"]
    said = re.search(r"`(\S+ \(10\.10\.1\.1\) routes to 10\.10\.1\.1)`", page)[1]
    assert routed.startswith(said)


def test_blocks_are_commands_outputs_python_or_diffs_and_can_be_copied_whole():
    for name, page in PAGES.items():
        kinds = {kind for kind, _ in page.blocks()}
        assert kinds <= {"bash", "text", "python", "diff"}, name
        for command in page.commands():
            assert command == command.strip() != "", f"{name}: {command!r}"
            assert " #" not in command, f"{name}: a comment would break zsh: {command}"
            assert not re.search(r"\\$|&$|…|<\w+>", command), f"{name}: {command}"


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    seen = 0
    for path in {*ROOT.glob("*.md"), *(page.path for page in PAGES.values())}:
        text = re.sub(r"<!--.*?-->", "", path.read_text())
        for file, heading in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text):
            found = path.parent / file if file else path
            assert found.exists(), f"{path}: {file}"
            assert not heading or heading in anchors(found.read_text()), f"{path}: {heading}"
            seen += 1
    assert seen > 150


def test_every_import_that_a_page_or_the_contract_shows_works():
    texts = [CONTRACT, *(page.text for page in PAGES.values())]
    shown = re.findall(r"^ *(from (?:common|lab)\S* import .+)", "\n".join(texts), re.MULTILINE)
    for line in set(shown):
        exec(line, {})


def test_the_files_for_github_are_whole():
    citation, workflow, form = (
        yaml.safe_load((ROOT / name).read_text())
        for name in ("CITATION.cff", ".github/workflows/ci.yml", ".github/ISSUE_TEMPLATE/bug.yml")
    )
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert workflow["jobs"]["ci"]["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    asked = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert {"command", "doctor", "log"} <= asked
    assert "`lab doctor --json`" in str(form)
