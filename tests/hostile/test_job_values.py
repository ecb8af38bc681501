"""Values with quotes, newlines and what a shell replaces, in the Slurm scripts and the TrainJob.

The real shells run the scripts' own text. tests/engines/test_slurm.py runs a whole job.
"""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests.helpers.paths import ROOT
from tests.helpers.processes import write_program

VALUES = [
    "plain",
    "two words",
    'it\'s "quoted"',
    "new\nline",
    "$(touch mark)`touch mark`$HOME",
    "a; touch mark & b | c > mark",
    "* [x] ? {a,b} ~",
    "100%t",
    "ünï → 水",
]


def output_of(command, cwd, **variables):
    """Run a command and return what it prints; status 0, and no value has run as a command."""
    environment = {name: str(value) for name, value in (os.environ | variables).items()}
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (cwd / "mark").exists()
    return ended.stdout


@pytest.mark.parametrize("value", VALUES)
def test_slurm_reads_the_folders_of_the_flags_as_they_are(value, tmp_path):
    """The folders of output and data, which the part prints as text, and the words of the command.

    Of two starts, the second finds the first one's run.
    """
    output, data = tmp_path / value, tmp_path / "data" / value
    run = output / "PartTwo-all_reduce" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").touch()
    python = write_program(
        tmp_path / "python",
        "import json, os, sys\n"
        "if sys.argv[-1] != '--print-config':\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "for name, flag in (('output_dir', '--output-dir'), ('data_dir', '--data-dir')):\n"
        "    print(f'{name} = {json.dumps(flags[flag], ensure_ascii=False)}')\n",
    )
    command = ["PartTwo/main.py", "--output-dir", output, "--data-dir", data, "--run-name", "mine"]
    shell = 'source "$0"; check_job "$@"; printf "%s\\0" "$OUTPUT" "$DATA" "$LOGS" "${COMMAND[@]}"'
    printed = output_of(
        ["bash", "-c", shell, ROOT / "launch" / "slurm-common.sh", *command],
        tmp_path,
        PYTHON=python,
        SLURM_JOB_ID=7,
        SLURM_JOB_NODELIST="n[0-1]",
        SLURM_JOB_NUM_NODES=2,
        SLURM_TASKS_PER_NODE="1(x2)",
    )
    job = (output, data, output / "slurm-7", *command, "--resume", "auto")
    assert printed.split("\0")[:-1] == list(map(str, job))
    assert (output / "slurm-7").is_dir()


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "SLURM_JOB_ID": ["", None, "0", "../../x", "a[$(touch mark)]", "9" * 20],
        "SLURM_JOB_NUM_NODES": ["", None, "0", "-1", "1e9", "9" * 20, "x[$(touch mark)]"],
        "SLURM_RESTART_COUNT": ["x", "-1", "a[$(touch mark)]"],
        "SLURM_TASKS_PER_NODE": ["", None, "2(x2)", "1(x1),2"],
        "SLURM_ARRAY_TASK_ID": ["../x", "3"],  # without SLURM_ARRAY_JOB_ID
        "SLURM_JOB_NODELIST": ["", None],
    }.items(),
)
def test_slurms_variables_are_refused_in_one_line(name, values, tmp_path):
    for value in values:
        variables = {key: text for key, text in (JOB | {name: value}).items() if text is not None}
        script = 'source "$0"; check_job true'
        ended = subprocess.run(
            ["bash", "-c", script, ROOT / "launch" / "slurm-common.sh"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "LAB_OUTPUT": str(tmp_path)} | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 2, (value, ended)
        assert ended.stderr.startswith("error: "), (value, ended)
        assert len(ended.stderr.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", VALUES)
def test_a_trainjob_passes_its_args_on_as_they_are(value, tmp_path):
    """The manifest's own sh command; the variables hold odd values, too."""
    [trainer] = [
        document["spec"]["trainer"]
        for document in yaml.safe_load_all((ROOT / "launch" / "trainjob.yaml").read_text())
        if document["kind"] == "TrainJob"
    ]
    write_program(tmp_path / "torchrun", "import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    printed = output_of(
        [*trainer["command"], "PartThree/main.py", f"--output-dir={value}", value],
        tmp_path,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        PET_NODE_RANK=0,
        PET_MASTER_ADDR=value,
        PET_MASTER_PORT=29500,
    )
    words = json.loads(printed)
    assert words[-3:] == ["PartThree/main.py", f"--output-dir={value}", value]
    assert f"--rdzv-endpoint={value}:29500" in words


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = sorted(ROOT.glob("launch/*.sh")) + sorted(ROOT.glob("launch/*.sbatch"))
    assert output_of(["shellcheck", "--external-sources", *scripts], ROOT) == ""
