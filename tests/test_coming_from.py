"""The five programs before this project: every name, flag and file that they document still works.

``NAMES`` is the one list: by example, what the example types. The examples are the pages' own
commands, script and blocks, word by word; the tests below run them on small data. Whoever removes a
name from the code breaks its example; whoever removes it from the example fails the first test.
"""

import inspect
import os
import re
import runpy
import shlex
import sys

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common import evaluation, training
from common.checkpoint import load_checkpoint
from common.cli import main
from common.models import MODELS, build_model
from common.training_engine import TrainingEngine
from tests.helpers import ROOT, TINY, free_port, run_ranks, start_part
from tests.helpers.documentation import Page

RECIPES = Page(ROOT / "docs/recipes.md")
RELIABILITY = Page(ROOT / "docs/reliability.md")
FUNCTIONS_PAGE, ENGINE = Page(ROOT / "docs/functions.md"), Page(ROOT / "docs/engine.md")
FUNCTIONS = ROOT / "docs/examples/my_training.py"

# What each program is started with, and the command that the page gives instead.
COMMANDS = {
    "python main.py": "python PartOne/main.py --recipe cs744",
    "python main_gather.py --master-ip IP --num-nodes 4 --rank R": (
        "python PartTwo/main.py --recipe cs744 --sync gather_scatter --master-ip IP --num-nodes 4 "
        "--rank R"
    ),
    "python main_all_reduce.py --master-ip IP --num-nodes 4 --rank R": (
        "python PartTwo/main.py --recipe cs744 --sync all_reduce --master-ip IP --num-nodes 4 "
        "--rank R"
    ),
    "python main_ddp.py --master-ip IP --num-nodes 4 --rank R": (
        "python PartThree/main.py --recipe cs744 --master-ip IP --num-nodes 4 --rank R"
    ),
    "torchrun --nproc_per_node=2 train.py --dataset cifar100 --batch-size 512 --epochs 5 "
    "--base-lr 0.01 --target-accuracy 0.85 --patience 2": (
        "torchrun --nproc_per_node=2 PartThree/main.py --recipe wide-resnet-cifar100 "
        "--dataset cifar100 --batch-size 512 --epochs 5 --base-lr 0.01 --target-accuracy 0.85 "
        "--patience 2"
    ),
    "torchrun --nproc_per_node=2 train.py -b 128 --lr 0.1 --log-wandb --experiment resnet50": (
        "torchrun --nproc_per_node=2 PartThree/main.py --recipe resnet50-cifar100 -b 128 --lr 0.1 "
        "--log-wandb --experiment resnet50"
    ),
    "python main.py --epochs 50 --batch-size 32 --learning_rate 0.001 --accumulation_steps 4 "
    "--gpu_ids 0,1 --dist_url tcp://127.0.0.1:23456 --checkpoint model.pth": (
        "python PartThree/main.py --recipe resnet18-transfer-cifar10 --epochs 50 -b 32 "
        "--learning_rate 0.001 --accumulation_steps 4 --gpu_ids 0,1 "
        "--dist_url tcp://127.0.0.1:23456 --checkpoint model.pth"
    ),
    "torchrun --max-restarts": (
        "torchrun --standalone --nproc-per-node 2 --max-restarts 3 PartThree/main.py "
        "--recipe resnet-cifar10-ema --checkpoint-every 100 --resume auto"
    ),
    "python train.py --distributed --world-size 4 --epochs 200 --batch-size 128 --lr 0.1 --use-amp "
    "--use-ema": (
        "python PartThree/main.py --recipe resnet-cifar10-ema --distributed --world-size 4 "
        "--epochs 200 -b 128 --lr 0.1 --use-amp --use-ema"
    ),
}

[NOTEBOOK] = (text for kind, text in FUNCTIONS_PAGE.blocks() if kind == "python")
[OWN_GROUP] = (text for kind, text in ENGINE.blocks() if kind == "python")
[OWN_SCRIPT] = (text for kind, text in RECIPES.blocks() if kind == "python")

EXAMPLES = {
    "the commands of the programs": "\n".join(COMMANDS),
    "the commands here": "\n".join(COMMANDS.values()),
    "the assignment's functions": FUNCTIONS.read_text(),
    "TrainingEngine from a notebook": NOTEBOOK,
    "TrainingEngine in a group": OWN_GROUP,
    "TrainingEngine in a script": OWN_SCRIPT,
}

# Every name, flag and file that the programs document, by the example that types it. Two flags are
# spelt otherwise here: a batch of each process is -b, and pretrained weights are the recipe's.
NAMES = {
    "the commands of the programs": """
        --master-ip --num-nodes --rank
        --nproc_per_node --dataset --batch-size --epochs --base-lr --target-accuracy --patience
        -b --lr --log-wandb --experiment
        --learning_rate --accumulation_steps --gpu_ids --dist_url --checkpoint model.pth
        --distributed --world-size --use-amp --use-ema""",
    "the commands here": """
        PartOne/main.py PartTwo/main.py PartThree/main.py gather_scatter all_reduce
        --master-ip --num-nodes --rank
        --nproc_per_node --dataset --batch-size --epochs --base-lr --target-accuracy --patience
        -b --lr --log-wandb --experiment
        --learning_rate --accumulation_steps --gpu_ids --dist_url --checkpoint model.pth
        --max-restarts --resume --checkpoint-every
        --distributed --world-size --use-amp --use-ema""",
    "the assignment's functions": """
        get_model_parameters prepare_model_for_training train_model prepare_model_for_evaluation
        evaluate_model task_flag log_{rank}.txt Epoch_2.pt report.txt""",
    "TrainingEngine from a notebook": """
        launch_distributed_training distributed_train_worker world_size model_fn train_dataset
        val_dataset batch_size num_workers optimizer_fn criterion_fn scheduler_fn engine_kwargs
        train_kwargs use_amp use_ema experiment_name num_epochs target_accuracy patience
        val_accuracy""",
    "TrainingEngine in a group": """
        TrainingEngine distributed sync accumulation_steps clip_norm train num_epochs scheduler""",
    "TrainingEngine in a script": """
        setup_distributed TrainingEngine distributed use_amp use_ema train num_epochs
        _reduce_tensor cleanup_distributed""",
}

# The arguments of the assignment's six functions that a script may give by position.
ARGUMENTS = {
    training.get_model_parameters: "model",
    training.prepare_model_for_training: (
        "model device learning_rate momentum weight_decay continue_flag continue_checkpoint_path "
        "distribute_flag"
    ),
    training.train_model: (
        "model device criterion optimizer start_epoch end_epoch train_loader logs_path "
        "checkpoint_dir distribute_flag task_flag rank"
    ),
    evaluation.prepare_model_for_evaluation: "model device checkpoint_path",
    evaluation.evaluate_model: "model device criterion test_loader report_path checkpoint_path",
    evaluation.generate_eval_report: (
        "ground_truth prediction test_loss report_path checkpoint_path"
    ),
}
HISTORY = (
    "epoch train_loss train_accuracy val_loss val_accuracy ema_val_loss ema_val_accuracy "
    "learning_rate samples_per_second seconds"
)


def test_every_example_types_its_names():
    missing = {
        name
        for example, names in NAMES.items()
        for name in names.split()
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", EXAMPLES[example])
    }
    assert missing == set()


def test_the_pages_show_every_command():
    for theirs, ours in COMMANDS.items():
        if theirs == ELASTIC:
            assert ours in RELIABILITY.commands()
        else:
            assert ours in RECIPES.text
            assert f"`{theirs}`" in RECIPES.text


# --- the commands ---

SMALL = ("--dataset", "digits", "--max-steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the empty folder in which all commands are typed."""
    return tmp_path_factory.mktemp("typed")


def typed(command, folder, *more, model=TINY, **environment):
    """Run a command of the page on small data and return what each of its ranks printed."""
    before, part, flags = re.fullmatch(r"(.*?)(\w+)/main\.py(.*)", command).groups()
    words = shlex.split(flags)
    nodes = re.search(r"--num-nodes (\d)", flags) or re.search(r"nproc.per.node[= ](\d)", before)
    size = int(nodes[1]) if nodes else 1
    port = free_port()
    started = []
    for rank in range(size):
        place = dict(environment)
        if before.startswith("torchrun"):
            place |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            place |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = [{"IP": "127.0.0.1", "R": str(rank)}.get(word, word) for word in words]
        if "--master-ip" in own:
            own += ["--master-port", port]
        place = {name: str(value) for name, value in place.items()}
        started.append(start_part(part, *own, *SMALL, *model, *more, cwd=folder, env=place))
    ended = [process.end() for process in started]
    assert [one.status for one in ended] == [0] * size, ended
    return [one.out + one.err for one in ended]


ASSIGNMENT = [command for command in COMMANDS if command.startswith("python main")][:4]
ELASTIC = "torchrun --max-restarts"
[EARLY_STOP] = (command for command in COMMANDS if "--patience" in command)
[WANDB] = (command for command in COMMANDS if "--log-wandb" in command)
[TRANSFER] = (command for command in COMMANDS if "--accumulation_steps" in command)
[AVERAGED] = (command for command in COMMANDS if "--use-ema" in command)


@pytest.mark.parametrize("theirs", ASSIGNMENT)
def test_the_assignments_four_ways(theirs, folder):
    first, *others = typed(COMMANDS[theirs], folder, "--output-dir", "out")
    assert "without the first" in first
    assert all("finished after 2 steps" in text for text in others)


def test_the_early_stop(folder):
    flags = ("--output-dir", "out", "--target-accuracy", "0.01", "--patience", "1")
    first, _ = typed(COMMANDS[EARLY_STOP], folder, *flags)
    assert "Target accuracy reached in epoch 1: 0.01" in first


def test_weights_and_biases(folder):
    """The library is disabled here; test_trackers.py shows what it gets."""
    pytest.importorskip("wandb")
    environment = {"WANDB_MODE": "disabled", "HOME": str(folder)}
    typed(COMMANDS[WANDB], folder, "--output-dir", "out", **environment)
    assert [path.name for path in (folder / "out").glob("*50")] == ["resnet50"]


def test_accumulation_on_two_gpus_or_without_them(folder):
    if torch.cuda.device_count() < 2:
        with pytest.raises(AssertionError, match="--gpu-ids: got 0,1"):
            typed(
                COMMANDS[TRANSFER].replace("--gpu_ids 0,1", "--gpu_ids 0,1 --num-nodes 1"), folder
            )
    without = re.sub(r"--gpu_ids \S+ --dist_url \S+ ", "", COMMANDS[TRANSFER])
    launched = without.replace("python", "torchrun --nproc_per_node=2")
    typed(launched, folder, "--output-dir", "out")
    assert load_checkpoint(folder / "model.pth")["plan"]["batch_size"] == 32 * 4 * 2


def test_the_elastic_start_resumes(folder):
    flags = ("--output-dir", "elastic", "-b", "16", "--accumulation-steps", "1")
    typed(COMMANDS[ELASTIC], folder, *flags, "--checkpoint-every", "1")
    first, _ = typed(COMMANDS[ELASTIC], folder, *flags)
    assert re.match(r"resuming from elastic/.*, step 2\n", first)


@pytest.mark.slow
def test_four_processes_with_an_average_of_the_weights(folder):
    """The processes are new interpreters, which do not know the small model."""
    flags = ("--output-dir", "out", "-b", "8")
    [printed] = typed(COMMANDS[AVERAGED], folder, *flags, model=("--model", "vgg11"))
    assert re.search(r"equal weights +yes", printed)


def test_every_flag_of_the_table_is_answered(capsys):
    """A part takes the flag, or says what it has in its place."""
    how = {"path": "", "description": "", "sync_choices": ("ddp",)}
    section = RECIPES.text.partition("\n## Coming from another script\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`-.*?) \| .* \|$", section, re.MULTILINE)
    flags = [flag for row in rows for flag in re.findall(r"(?<=`)--?[\w-]+", row)]
    assert len(flags) > 20
    for flag in flags:
        if main("PartThree", arguments=[flag, "1", "--print-config"], **how):
            error = capsys.readouterr().err
            assert re.search(rf"^error: there is no flag --|{flag}: ", error), error
            assert "--help-all" not in error or "did you mean" in error, "the flag is not known"


# --- the assignment's functions ---


def test_the_functions_take_the_assignments_arguments_by_position(tmp_path):
    for function, names in ARGUMENTS.items():
        by_position = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        assert by_position == names.split()
    path = tmp_path / "report.txt"
    assert evaluation.generate_eval_report([0, 1], [0, 0], 0.5, path, "x.pt")["accuracy"] == 0.5
    assert path.read_text().startswith("Checkpoint: x.pt\nTest loss: 0.5000\n")


def run_my_training(rank, folder, ports):
    """Run the script as torchrun would, with each of the assignment's tasks."""
    dist.destroy_process_group()
    MODELS["vgg11"] = "tests.helpers.tiny_model:tiny"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for task_flag, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        (folder / task_flag).mkdir(exist_ok=True)
        os.chdir(folder / task_flag)
        sys.argv = [str(FUNCTIONS), task_flag]
        runpy.run_path(str(FUNCTIONS), run_name="__main__")


def test_the_script_of_the_functions_runs_on_two_ranks(tmp_path):
    tasks = ("PartOne", "PartTwo")
    run_ranks(2, run_my_training, tmp_path, {task_flag: free_port() for task_flag in tasks})
    for task_flag in tasks:
        folder = tmp_path / task_flag / "reports/functions"
        left = {path.name for path in folder.iterdir()}
        assert {"Epoch_1.pt", "Epoch_2.pt", "log_0.txt", "log_1.txt", "report.txt"} <= left
        line = (folder / "log_1.txt").read_text()
        assert re.match(r"Rank: 1, Epoch: 1, Train Loss: \d.*, Avg Batch Duration: \d", line)


# --- three ways of TrainingEngine ---


def pictures(count):
    """Return pictures with their labels: the brightness tells the class."""
    labels = torch.arange(count) % 10
    return TensorDataset(labels.view(-1, 1, 1, 1).expand(-1, 3, 32, 32) / 10, labels)


def test_from_a_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODELS, "resnet18", "tests.helpers.tiny_model:tiny")
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", lambda *_, **__: pictures(40))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    names = {}
    exec(NOTEBOOK, names)
    assert list(names["history"]) == HISTORY.split()
    assert float(capsys.readouterr().out.splitlines()[-1]) == max(names["history"]["val_accuracy"])
    assert {path.name for path in (tmp_path / "reports/resnet18").iterdir()} == {
        "best.pt",
        "last.pt",
    }


def in_a_group(rank, folder):
    """Type both blocks with loaders, a model, an optimiser and a scheduler of one's own."""
    os.chdir(folder)
    data, model = pictures(40), build_model("tiny", 10)
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        **{"rank": rank, "world_size": 2, "model": model, "optimizer": optimizer, "nn": nn},
        **{"train_loader": loader, "val_loader": loader, "torch": torch},
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "TrainingEngine": TrainingEngine,
        "metric": float(rank),
    }
    exec(OWN_GROUP.replace('"cuda"', '"cpu"'), names)
    history = names["history"]
    exec(OWN_SCRIPT.replace('"cuda"', '"cpu"').replace("num_epochs=200", "num_epochs=2"), names)
    assert not dist.is_initialized()
    return len(history["epoch"]), names["history"]["ema_val_accuracy"], names["mean"].item()


def test_in_a_group_and_in_a_script(tmp_path):
    first, second = run_ranks(2, in_a_group, tmp_path)
    assert first == second
    epochs, averaged, mean = first
    assert (epochs, len(averaged), mean) == (10, 2, 0.5)
