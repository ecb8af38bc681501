"""What scripts demand: from how one refuses its command to the next command, without a run."""

import msgspec
import pytest

from lab.grade.demands import Refusal, next_task, shown_command
from lab.grade.sandbox import Task

DEMANDED = "--master-ip {master} --num-nodes {nodes} --rank {rank}"
USAGE = (
    "usage: main.py [-h] {}\n               [--lr LR]\nmain.py: error: unrecognized arguments: -x\n"
)
ARGV = "import sys\nrank, a.world_size = int(sys.argv[1]), int(sys.argv[2])\na.ip = sys.argv[3]\n"
OWN_USAGE = "usage: main.py [options]\nmain.py: error: unrecognized arguments: -x\n"
NAMES = "p.add_argument('-a', '--address')\np.add_argument('-k', '--rank', type=int)\n"
DECLARED = "p.add_argument('--cpu', action='store_true')\np.add_argument('world_size', type=int)\n"
READS_RANK = 'rank = int(os.environ["RANK"])\n'
INIT = "Error initializing torch.distributed using"


@pytest.fixture
def task(tmp_path):
    files = {"lab/part2/main.py": "", "lab/tools.py": "", "config.json": "", "results/a.txt": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Task(
        words=["/usr/bin/python3", "main.py", *DEMANDED.split()],
        ranks=[2],
        submission=str(tmp_path),
        script="lab/part2/main.py",
        start="lab/part2",
        facts="",
        key="",
        mounts={"data": "/data"},
        memory_bytes=1,
        disk_bytes=1,
        processes=1,
        limit_seconds=1,
        sandboxed=True,
    )


def refusal(kind="", message="", printed="", *sources, alone=False):
    return Refusal(kind, message, printed, alone, list(sources))


COMMANDS = {  # by how the script refuses: the arguments of the next command
    "url": (
        refusal("RuntimeError", "No rendezvous handler for ://"),
        "python3 main.py --master-ip tcp://{master}:{port} --num-nodes {nodes} --rank {rank}",
    ),
    "with-port": (
        refusal("ValueError", f"{INIT} tcp:// rendezvous: port number missing"),
        "python3 main.py --master-ip {master}:{port} --num-nodes {nodes} --rank {rank}",
    ),
    "torchrun": (refusal("KeyError", "'RANK'"), "torchrun main.py"),
    "init-env": (
        refusal("ValueError", f"{INIT} env:// rendezvous: environment variable RANK expected"),
        "torchrun main.py",
    ),
    "alone": (refusal("", "", "", READS_RANK, alone=True), "torchrun main.py"),
    "slurm": (
        refusal("KeyError", "'SLURM_PROCID'"),
        f"env SLURM_PROCID={{rank}} python3 main.py {DEMANDED}",
    ),
    "flags": (
        refusal(printed=USAGE.format("--master_addr MASTER_ADDR [--world-size N] -r RANK")),
        "python3 main.py --master_addr {master} --world-size {nodes} -r {rank}",
    ),
    "same-flag": (
        refusal(printed=USAGE.format("[--num_nodes NUM] --rank RANK [--init-method URL] [--gpu]")),
        "python3 main.py --num_nodes {nodes} --rank {rank} --init-method tcp://{master}:{port}",
    ),
    "size-of-a-picture": (
        refusal(printed=USAGE.format("[--size SIZE] [--world-size N] [--rank RANK] [--host HOST]")),
        "python3 main.py --world-size {nodes} --rank {rank} --host {master}",
    ),
    "spawn": (
        refusal("RuntimeError", "Address already in use", "", "mp.spawn(train, nprocs=2)"),
        "python3 main.py --master-ip {master} --num-nodes {nodes}",
    ),
    "required": (
        refusal(printed=USAGE.format("--node-rank R --epochs EPOCHS --data-dir DATA_DIR")),
        "python3 main.py --node-rank {rank} --epochs 1 --data-dir data",
    ),
    "lower-case": (
        refusal(printed=USAGE.format("[--debug] --master master-address --size <nodes> -r rank")),
        "python3 main.py --master {master} --size {nodes} -r {rank}",
    ),
    "other-names": (  # the usage shows the first name alone
        refusal("", "", USAGE.format("-a A -k K"), NAMES),
        "python3 main.py -a {master} -k {rank}",
    ),
    "declared": (
        refusal("", "", OWN_USAGE, f"{NAMES}{DECLARED}"),
        "python3 main.py --address {master} --rank {rank} {nodes}",
    ),
    "positional-in-usage": (
        refusal(printed=USAGE.format("[--batch-size BATCH_SIZE] master_ip rank num_nodes")),
        "python3 main.py {master} {rank} {nodes}",
    ),
    "argv": (
        refusal("ValueError", "invalid literal for int() with base 10: '--rank'", "", ARGV),
        "python3 main.py {rank} {nodes} {master}",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_command_is_what_the_script_asks_for(task, name):
    refused, command = COMMANDS[name]
    assert shown_command(next_task(task, refused)) == command


OWN_COMMANDS = {  # by what the notes say: the arguments of the next command
    "python3 main.py --temp 3 --at 10.10.1.1 --rank 0\npython main.py --temp 3 --at 10.10.1.1 "
    "--rank 1": "main.py --temp 3 --at {master} --rank {rank}",
    "Run `python main.py 10.0.0.1 2 0 --quick` and `python x.py`,\nthen\n"
    "$ python main.py 10.0.0.1 2 1 --quick &": "main.py {master} {nodes} {rank} --quick",
    "for i in 0 1 2; do\n  python src/main.py --id=$i --init tcp://node0:77 $WORLD_SIZE &\ndone": (
        "main.py --id {rank} --init tcp://{master}:{port} {nodes}"
    ),
    "python main.py --help\n": None,
    "torchrun --nproc_per_node=4 main.py --temp 3": "torchrun main.py --temp 3",
}


@pytest.mark.parametrize("note", OWN_COMMANDS)
def test_the_authors_own_command_is_tried_when_nothing_else_is_known(task, note):
    asks = refusal(printed=USAGE.format("--temp T --rank RANK"))
    assert next_task(task, asks) is None
    tried = next_task(task, msgspec.structs.replace(asks, written=["Nothing.", note]))
    expected = OWN_COMMANDS[note]
    if expected is None:
        assert tried is None
    else:
        assert shown_command(tried).removeprefix("python3 ") == expected


def test_what_no_command_can_meet_has_no_next_one(task):
    unknown = USAGE.format("--temperature T --rank RANK")
    for hopeless in (
        refusal(printed=unknown),
        refusal("SyntaxError", "Missing parentheses in call to 'print'"),
        refusal("ModuleNotFoundError", "No module named 'einx'"),
        refusal("KeyError", "'weights'"),
        refusal("", "", "", "print(1)", alone=True),
    ):
        assert next_task(task, hopeless) is None


def test_torchrun_and_flags_of_a_rank_meet_in_the_environment(task):
    launched = next_task(task, refusal("KeyError", "'RANK'"))
    asks = refusal(printed=USAGE.format("--rank RANK"))
    told = next_task(launched, asks)
    assert "RANK={rank}" in told.words
    assert shown_command(next_task(told, asks)).endswith("python3 main.py --rank {rank}")
    assert len(next_task(told, asks).changes) == 3


def test_what_the_demanded_command_gives_besides_stays(task):
    own = ["--do_train", "--model", "bert", "--lr", "2e-5", "--max-steps", "9"]
    task = msgspec.structs.replace(task, words=[*task.words[:2], *own, *task.words[2:]])
    asks = refusal(printed=USAGE.format("[--model {bert,gpt}] [--do_train] --rank RANK"))
    kept = ["--model", "bert", "--do_train", "--rank", "{rank}", "--lr", "2e-5"]
    assert next_task(task, asks).words[2:] == kept


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("Unable to find address for: eth1", "eth1"),
        ("failed to connect to any network address of (10.10.1.1, 29511).", "10.10.1.1"),
        ("TCP client failed to connect/validate to host node0:29511 - retrying", "node0"),
    ],
)
def test_the_network_gets_what_the_script_names(task, message, name):
    changed = next_task(task, refusal("RuntimeError", message))
    assert (changed.names, changed.words) == ([name], task.words)
    assert next_task(msgspec.structs.replace(task, sandboxed=False), refusal("", message)) is None


def test_folders_are_made_where_it_writes_and_it_starts_where_its_files_are(task, tmp_path):
    missing = "[Errno 2] No such file or directory: '{}'"
    made = next_task(task, refusal("FileNotFoundError", missing.format("out/log.txt")))
    assert made.folders == [f"{tmp_path}/lab/part2/out"]
    assert next_task(made, refusal("FileNotFoundError", missing.format("out/log.txt"))) is None
    saved = refusal("RuntimeError", "Parent directory /users/me/out does not exist.")
    assert next_task(task, saved).folders == ["/users/me/out"]
    for path in ("config.json", "results/new.txt"):
        moved = next_task(task, refusal("FileNotFoundError", missing.format(path)))
        assert (moved.cwd, moved.words[1]) == (tmp_path, "lab/part2/main.py")
    module = next_task(task, refusal("ModuleNotFoundError", "No module named 'tools'"))
    assert module.environment == {"PYTHONPATH": f"{tmp_path}/lab"}
