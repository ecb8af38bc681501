"""Values with quotes, newlines and what a shell replaces, in the Slurm scripts and the TrainJob.

The real shells run the scripts' own text. tests/engines/test_slurm.py runs a whole job.
"""

import json
import os
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

from tests.helpers.paths import ROOT

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


@pytest.mark.parametrize("value", VALUES)
def test_slurm_reads_the_folders_of_the_flags_as_they_are(value, tmp_path):
    """The folders of output and data, which the part prints as text, and the words of the command.

    Of two starts, the second finds the first one's run.
    """
    output, data = tmp_path / value, tmp_path / "data" / value
    run = output / "PartTwo-all_reduce" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").touch()
    fake = (
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "if sys.argv[-1] != '--print-config':\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "for name, flag in (('output_dir', '--output-dir'), ('data_dir', '--data-dir')):\n"
        "    print(f'{name} = {json.dumps(flags[flag], ensure_ascii=False)}')\n"
    )
    python = tmp_path / "python"
    python.write_text(fake)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    command = ["PartTwo/main.py", "--output-dir", output, "--data-dir", data, "--run-name", "mine"]
    ended = subprocess.run(
        [
            "bash",
            "-c",
            'source "$0"; check_job "$@"; printf "%s\\0" "$OUTPUT" "$DATA" "$LOGS" "${COMMAND[@]}"',
            ROOT / "launch" / "slurm-common.sh",
            *command,
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHON": str(python),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_TASKS_PER_NODE": "1(x2)",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\0")[:-1] == [
        *map(str, (output, data, output / "slurm-7", *command)),
        "--resume",
        "auto",
    ]
    assert (output / "slurm-7").is_dir()
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("value", VALUES)
def test_a_trainjob_passes_its_args_on_as_they_are(value, tmp_path):
    """The manifest's own sh command; the variables hold odd values, too."""
    [trainer] = [
        document["spec"]["trainer"]
        for document in yaml.safe_load_all((ROOT / "launch" / "trainjob.yaml").read_text())
        if document["kind"] == "TrainJob"
    ]
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(torchrun.stat().st_mode | stat.S_IXUSR)
    ended = subprocess.run(
        [*trainer["command"], "PartThree/main.py", f"--output-dir={value}", value],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PET_NODE_RANK": "0",
            "PET_MASTER_ADDR": value,
            "PET_MASTER_PORT": "29500",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    words = json.loads(ended.stdout)
    assert words[-3:] == ["PartThree/main.py", f"--output-dir={value}", value]
    assert f"--rdzv-endpoint={value}:29500" in words
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = sorted(ROOT.glob("launch/*.sh")) + sorted(ROOT.glob("launch/*.sbatch"))
    ended = subprocess.run(
        ["shellcheck", "--external-sources", *scripts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout
