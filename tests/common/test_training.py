"""The assignment's functions called directly, as in a notebook: any model, any loader."""

import copy
import re
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.checkpoint import load_checkpoint, load_optimizer_state
from common.config.parser import parse_arguments
from common.distributed.process_group import World
from common.errors import UserError
from common.evaluation import evaluate_model, generate_eval_report, prepare_model_for_evaluation
from common.models import build_model
from common.run_setup import Setup
from common.sync import BUILT_IN
from common.training import get_model_parameters, prepare_model_for_training, train_model
from common.training_engine.amp import autocast, choose_amp
from tests.helpers import run_ranks
from tests.helpers.engines import prepared as prepared_engine

LINE = re.compile(
    r"^(Rank: \d+, )?Epoch: \d+, Train Loss: \d+\.\d{3}, Train Accuracy: [01]\.\d{3}, "
    r"Avg Batch Duration: \d+\.\d{3} seconds, Epoch Duration: \d+\.\d{3} seconds$"
)


def points(count=60):
    """Return two classes that a line separates."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_parameters_are_counted_if_they_train():
    model = build_model("vgg11", 10)
    assert get_model_parameters(model) == 9_231_114
    model.classifier.requires_grad_(False)
    assert get_model_parameters(model) == 9_231_114 - 5_130


def prepared(rate=0.5, **more):
    return prepare_model_for_training(new_model(), "cpu", rate, 0.9, 0.0, False, **more)


def train(prepared, loader, folder, epochs=(1, 1), **more):
    """Train on the CPU; the log is ``folder/log.txt``."""
    model, criterion, optimizer = prepared
    arguments = {"distribute_flag": False, "logs_path": folder / "log.txt"} | more
    return train_model(
        model, "cpu", criterion, optimizer, *epochs, loader, checkpoint_dir=folder, **arguments
    )


def test_alone_it_leaves_log_checkpoints_and_report(tmp_path):
    ready = prepared()
    loader = DataLoader(points(), batch_size=16, shuffle=True)
    trained = train(ready, loader, tmp_path, (1, 3))
    train((trained, *ready[1:]), loader, tmp_path, (4, 4))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [int(re.search(r"Epoch: (\d+)", line)[1]) for line in lines] == [1, 2, 3, 4]
    assert all(LINE.match(line) and not line.startswith("Rank") for line in lines), lines
    saved = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert saved == [f"Epoch_{n}.pt" for n in (1, 2, 3, 4)]
    path, report = tmp_path / "Epoch_4.pt", tmp_path / "report.txt"
    entries = load_checkpoint(path)
    assert entries["epoch"] == 4
    assert entries["loss"] < 0.3

    evaluated = prepare_model_for_evaluation(new_model(), "cpu", path)
    assert not evaluated.training
    loader = DataLoader(points(), batch_size=7)
    result = evaluate_model(evaluated, "cpu", ready[1], loader, report, path)
    assert result.accuracy > 0.9
    with torch.no_grad():
        inputs, labels = points().tensors
        mean_over_samples = float(ready[1](trained(inputs), labels))
    assert result.mean_loss == pytest.approx(mean_over_samples, rel=1e-5)
    text = report.read_text()
    assert str(path) in text
    for words in ("Test loss (mean over samples)", "accuracy", "precision", "Confusion matrix"):
        assert words in text


def slow_first():
    """Yield batches, the first after 1 s."""
    for index, batch in enumerate(DataLoader(points(), batch_size=16)):
        time.sleep(index == 0)
        yield batch


def test_the_average_batch_duration_leaves_out_the_first_batch(tmp_path):
    train(prepared(), slow_first(), tmp_path)
    line = (tmp_path / "log.txt").read_text()
    assert float(re.search(r"Avg Batch Duration: ([\d.]+)", line)[1]) < 0.5
    assert float(re.search(r"Epoch Duration: ([\d.]+)", line)[1]) >= 1


def test_continue_flag_goes_on_with_the_checkpoints_settings_and_says_so(tmp_path):
    loader = DataLoader(points(), batch_size=16)
    ready = prepare_model_for_training(new_model(), "cpu", 0.5, 0.9, 1e-3, False)
    straight = copy.deepcopy(train(ready, loader, tmp_path, (1, 2)).state_dict())
    settings = r"lr 0\.5 \(not 0\.1\), momentum 0\.9 \(not 0\.8\), weight_decay 0\.001 \(not 0\.0\)"
    with pytest.warns(UserWarning, match=settings):
        ready = prepare_model_for_training(
            new_model(), "cpu", 0.1, 0.8, 0.0, True, tmp_path / "Epoch_1.pt"
        )
    resumed = train(ready, loader, tmp_path, (2, 2)).state_dict()
    assert all(torch.equal(value, straight[key]) for key, value in resumed.items())


def test_distribute_flag_and_task_flag_without_a_group(tmp_path):
    with pytest.raises(UserError, match="no process group is open"):
        prepared(distribute_flag=True)
    for flag, words in (
        ("PartTwo", "no process group is open"),
        ("ring", "no process group is open"),
        ("PartFour", "task_flag: got 'PartFour'"),
    ):
        with pytest.raises(UserError, match=words):
            train(prepared(), DataLoader(points()), tmp_path, task_flag=flag)


def train_in_a_group(rank, folder):
    """Train with each set of flags, evaluate on one rank, then train both on the same samples."""
    states = {}
    for name, distribute, task in (
        ("gather", False, "PartOne"),
        ("all_reduce", False, "PartTwo"),
        ("ring", False, "ring"),
        ("ddp", True, ""),
    ):
        sampler = DistributedSampler(points(), seed=1)
        loader = DataLoader(points(), batch_size=10, sampler=sampler)
        ready = prepared(distribute_flag=distribute)
        flags = {"distribute_flag": distribute, "task_flag": task}
        log = folder / f"{name}{rank}.txt"
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # each rank has its own samples: no warning
            model = train(ready, loader, folder / name, (1, 2), logs_path=log, **flags)
        wraps = sum(isinstance(module, DistributedDataParallel) for module in model.modules())
        assert wraps == distribute, "DDP wraps once, and only where it was asked for"
        assert sampler.epoch == 2, "set_epoch was called"
        lines = log.read_text().splitlines()
        assert len(lines) == 2
        assert all(LINE.match(line) and line.startswith(f"Rank: {rank}, ") for line in lines)
        states[name] = {
            key.removeprefix("module."): value.numpy() for key, value in model.state_dict().items()
        }
    for writer in (1, 0):  # one rank alone must not communicate
        if rank == writer:
            test_loader = DataLoader(points(), batch_size=8)
            report = folder / f"by_rank{rank}.txt"
            evaluate_model(model, "cpu", ready[1], test_loader, report, "none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = DataLoader(points(), batch_size=10)
        train(prepared(), same, folder / f"same{rank}", task_flag="PartTwo")
    same = "all ranks train on the same samples"
    assert any(same in str(warning.message) for warning in caught)
    return states


def test_in_a_group(tmp_path):
    first, second = run_ranks(2, train_in_a_group, tmp_path)
    for name, state in first.items():
        for key, value in state.items():
            assert (value == second[name][key]).all()
            assert abs(value - first["gather"][key]).max() < 1e-6, "all train the same"
        weights = torch.load(tmp_path / name / "Epoch_2.pt", weights_only=True)["model_state_dict"]
        assert not any(key.startswith("module.") for key in weights)
    assert (tmp_path / "by_rank0.txt").exists()
    assert not (tmp_path / "by_rank1.txt").exists(), "only rank 0 writes"


def test_a_report_counts_every_class_also_those_never_predicted(tmp_path):
    truth, predicted, names = [0, 1, 2, 2], [0, 0, 2, 2], list("abcd")
    path = tmp_path / "r.txt"
    result = generate_eval_report(truth, predicted, 1.25, path, "x.pt", class_names=names)
    assert result["confusion_matrix"] == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    assert result["accuracy"] == 0.75
    assert "Test loss: 1.2500" in path.read_text()
    generate_eval_report(truth, predicted, 1.0, path, "y.pt", loss_is="sum")
    both = path.read_text()
    again = "Appended to the report above:\nCheckpoint: y.pt\nTest loss (sum): 1.0000"
    assert again in both
    for truth, predicted in (([], []), ([0, 1], [0])):
        with pytest.raises(UserError, match="as many predictions as labels"):
            generate_eval_report(truth, predicted, 0.0, path, "x.pt")


@pytest.mark.parametrize(
    ("dtype", "exact", "fast_bf16", "chosen", "notice"),
    [
        (None, True, True, torch.float16, ""),
        ("bf16", True, True, torch.bfloat16, ""),
        ("bf16", True, False, torch.float16, "AMP uses fp16"),
        (None, False, True, torch.bfloat16, ""),
        (None, False, False, None, "AMP is off"),
        ("bf16", False, False, None, "AMP is off"),
        ("fp16", False, True, torch.float16, ""),  # the engine refuses it
    ],
)
def test_amp_on_a_gpu_chooses_a_type_that_the_strategy_allows(
    monkeypatch, dtype, exact, fast_bf16, chosen, notice
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: fast_bf16)
    gpu = torch.device("cuda")
    found, text = choose_amp(None, dtype, default=True, device=gpu, exact=exact)
    assert (found, bool(text)) == (chosen, bool(notice))
    assert notice in text
    assert choose_amp(None, dtype, default=True, device=torch.device("cpu")) == (None, "")


def test_a_part_on_gpus_trains_with_every_strategy_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    chosen, gpu = {}, torch.device("cuda")
    for sync in BUILT_IN:
        config = parse_arguments("PartThree", "", BUILT_IN, ["--sync", sync])
        for backend in ("nccl", None):  # without a group, no strategy changes the gradients
            setup = SimpleNamespace(config=config, world=World(0, 1, backend=backend, device=gpu))
            chosen[sync, backend] = Setup.amp.fget(setup)[0]
    lossy = {("ddp_fp16", "nccl"), ("ddp_powersgd", "nccl")}
    assert {one for one, dtype in chosen.items() if dtype == torch.bfloat16} == lossy
    assert {dtype for one, dtype in chosen.items() if one not in lossy} == {torch.float16}


def timed_step(rank):
    """Return the section times of a DDP step that rank 1 starts 2 s late."""
    first = nn.Linear(4, 8)

    def slow_down(_layer, _inputs, output):
        output.register_hook(lambda _gradient: time.sleep(0.3))  # must count as backward

    first.register_forward_hook(slow_down)
    model = nn.Sequential(first, nn.Linear(8, 2))
    batch = (torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))
    engine = prepared_engine(model, "ddp")
    for _ in range(2):  # DDP rearranges its buckets, with a message, in the second step
        engine.train_step([batch], global_samples=8)
    engine.timer.take()
    time.sleep(2 * rank)  # rank 0 must see this delay
    engine.train_step([batch], global_samples=8)
    return engine.timer.seconds(engine.timer.take())


@pytest.mark.alone
def test_sync_is_what_is_exposed_after_the_last_gradient_also_for_ddp():
    waiting, late = run_ranks(2, timed_step)
    assert waiting["sync"] > 1.5, "rank 0 waits for rank 1 in sync, not in backward"
    assert 0.3 <= waiting["backward"] < 1.5
    assert late["sync"] < 1.5


def test_a_checkpoint_moves_between_fused_and_plain_optimisers():
    """As from a CPU to a GPU and back: each keeps its own kernels, and the learning rate comes."""
    for fused, saved in ((True, None), (None, True)):
        one, other = (
            torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=rate, momentum=0.9, fused=kernel)
            for rate, kernel in ((0.3, saved), (0.1, fused))
        )
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
        load_optimizer_state(other, {"optimizer_state_dict": one.state_dict()}, name="x.pt")
        assert (other.param_groups[0]["fused"], other.param_groups[0]["lr"]) == (fused, 0.3)
        assert torch.equal(
            other.state_dict()["state"][0]["momentum_buffer"],
            one.state_dict()["state"][0]["momentum_buffer"],
        )


@pytest.mark.parametrize("saved", [None, torch.randn(4, 3, 3, 3)])
def test_a_loaded_momentum_has_values_and_the_strides_of_its_weights(saved):
    """Fused kernels refuse other strides on a GPU; without a saved one it is zero."""
    weights = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, fused=True)
    entries = {} if saved is None else {0: {"momentum_buffer": saved}}
    state = optimizer.state_dict() | {"state": entries}
    load_optimizer_state(optimizer, {"optimizer_state_dict": state}, name="x.pt")
    loaded = optimizer.state[weights]["momentum_buffer"]
    assert torch.equal(loaded, torch.zeros(4, 3, 3, 3) if saved is None else saved)
    assert loaded.stride() == weights.stride()


def test_without_amp_a_surrounding_autocast_ends_before_the_forward_pass():
    ones = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
        with autocast("cpu", None):
            assert (ones @ ones).dtype == torch.float32
    with autocast("cpu", torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
