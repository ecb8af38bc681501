"""What follows ``--``: who starts the ranks, and with which words."""

from pathlib import Path

import pytest

from lab.audit.command import parse_command


def processes(text, size, rank0=None):
    command = parse_command(text.split(), rank0)
    return [" ".join(words) for words in command.processes(size, master="10.0.0.1", port=77)]


TORCHRUNS = "--nproc_per_node 3 --master_port 77"
ACCELERATES = "--num_processes 3 --main_process_port 77"


@pytest.mark.parametrize(
    ("launcher", "script", "flags"),
    [
        ("torchrun --nproc-per-node 2 --standalone", "t.py --nproc-per-node 7", TORCHRUNS),
        ("/x/torchrun --nproc_per_node=8", "t.py", TORCHRUNS),
        ("python -m torch.distributed.run --nnodes 1", "-m t --nproc_per_node 7", TORCHRUNS),
        ("accelerate launch --cpu --num_processes 2", "t.py", ACCELERATES),
    ],
)
def test_a_launcher_gets_the_number_of_ranks_right_before_the_script(launcher, script, flags):
    typed = f"{launcher} {script}"
    assert processes(typed, 3) == [f"{launcher} {flags} {script}"]
    assert parse_command(typed.split(), None).takes_size


def test_the_number_of_ranks_goes_where_the_command_takes_it():
    assert processes("python t.py --ranks {nodes}", 3) == ["python t.py --ranks 3"]
    assert parse_command(["python", "t.py", "{nodes}"], None).takes_size
    assert not parse_command(["python", "t.py"], None).takes_size  # it starts its own ranks
    assert processes("python t.py", None) == ["python t.py"]


def test_a_command_with_rank_is_started_once_a_rank_and_no_launcher_is_changed():
    typed = "torchrun --nnodes {nodes} --node-rank {rank} --nproc-per-node 1 t.py {master}:{port}"
    assert processes(typed, 2) == [
        f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node 1 t.py 10.0.0.1:77"
        for rank in range(2)
    ]
    of_rank0 = ["python m.py 3", "python w.py 1", "python w.py 2"]
    assert processes("python w.py {rank}", 3, "python 'm.py' {nodes}") == of_rank0


def test_the_text_of_a_command_can_be_copied_into_a_shell():
    typed = ["python", "my script.py", "tcp://{master}:{port}", "{rank}"]
    shown = "python 'my script.py' 'tcp://{master}:{port}' {rank}"
    assert parse_command(typed, None).text == shown


def test_the_users_code_is_the_current_folder_or_the_scripts(tmp_path):
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.touch()
    below = parse_command(["python", "project/train.py"], None)
    assert below.user_folder(tmp_path) == tmp_path
    (tmp_path / "elsewhere").mkdir()
    driver = tmp_path / "elsewhere/driver.py"
    driver.touch()
    driven = parse_command(["python", str(driver), "project/train.py"], None)
    assert driven.user_folder(tmp_path) == tmp_path
    above = parse_command(["python", "../project/train.py"], None)
    assert above.user_folder(tmp_path / "elsewhere") == script.parent
    everything = parse_command(["python", str(script)], None)
    assert everything.user_folder(Path("/")) == script.parent  # not the standard library as well
