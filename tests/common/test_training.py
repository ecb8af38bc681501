"""The assignment's functions called directly, as in a notebook: any model, any loader.

No test uses ``run``.
"""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from common.checkpoint import load_checkpoint
from common.config.parser import parse_arguments
from common.distributed.process_group import World
from common.errors import UserError
from common.evaluation import evaluate_model, generate_eval_report, prepare_model_for_evaluation
from common.experiment.setup import Setup
from common.models import build_model
from common.sync import BUILT_IN
from common.training import get_model_parameters, prepare_model_for_training, train_model
from common.training_engine.amp import choose_amp
from tests.helpers import run_ranks

LINE = re.compile(
    r"^(Rank: \d+, )?Epoch: \d+, Train Loss: \d+\.\d{3}, Train Accuracy: [01]\.\d{3}, "
    r"Avg Batch Duration: \d+\.\d{3} seconds, Epoch Duration: \d+\.\d{3} seconds$"
)


def points(count: int = 60) -> TensorDataset:
    """Return two classes that a line separates."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_vgg11_has_the_published_number_of_parameters() -> None:
    model = build_model("vgg11", 10)
    assert get_model_parameters(model) == 9_231_114
    assert len(list(model.parameters())) == 34
    model.classifier.requires_grad_(False)
    assert get_model_parameters(model) == 9_231_114 - 5_130


def test_alone_it_leaves_log_checkpoints_and_report(tmp_path: Path) -> None:
    model, criterion, optimizer = prepare_model_for_training(
        new_model(), "cpu", 0.5, 0.9, 0.0, False
    )
    loader = DataLoader(points(), batch_size=16, shuffle=True)
    trained = train_model(
        model, "cpu", criterion, optimizer, 1, 3, loader, tmp_path / "log.txt", tmp_path, False
    )
    train_model(
        trained, "cpu", criterion, optimizer, 4, 4, loader, tmp_path / "log.txt", tmp_path, False
    )
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [int(re.search(r"Epoch: (\d+)", line)[1]) for line in lines] == [1, 2, 3, 4]
    assert all(LINE.match(line) and not line.startswith("Rank") for line in lines), lines
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        f"Epoch_{n}.pt" for n in (1, 2, 3, 4)
    ]
    entries = load_checkpoint(tmp_path / "Epoch_4.pt")
    assert entries["epoch"] == 4
    assert entries["loss"] < 0.3

    evaluated = prepare_model_for_evaluation(new_model(), "cpu", tmp_path / "Epoch_4.pt")
    assert not evaluated.training
    result = evaluate_model(
        evaluated,
        "cpu",
        criterion,
        DataLoader(points(), batch_size=7),
        tmp_path / "report.txt",
        tmp_path / "Epoch_4.pt",
    )
    assert result.accuracy > 0.9
    with torch.no_grad():
        inputs, labels = points().tensors
        assert result.mean_loss == pytest.approx(
            float(criterion(trained(inputs), labels)), rel=1e-5
        ), "mean over samples"
    report = (tmp_path / "report.txt").read_text()
    assert str(tmp_path / "Epoch_4.pt") in report
    for words in (
        "Test loss (mean over samples)",
        "Test accuracy",
        "precision",
        "Confusion matrix",
    ):
        assert words in report


class SlowFirst(DataLoader):
    """A loader whose first batch takes 1 s."""

    def __iter__(self):
        import time

        for index, batch in enumerate(super().__iter__()):
            if index == 0:
                time.sleep(1)  # the average must leave this out
            yield batch


def test_the_average_batch_duration_leaves_out_the_first_batch(tmp_path: Path) -> None:
    model, criterion, optimizer = prepare_model_for_training(
        new_model(), "cpu", 0.5, 0.9, 0.0, False
    )
    train_model(
        model,
        "cpu",
        criterion,
        optimizer,
        1,
        1,
        SlowFirst(points(), batch_size=16),
        tmp_path / "log",
        tmp_path,
        False,
    )
    line = (tmp_path / "log").read_text()
    assert float(re.search(r"Avg Batch Duration: ([\d.]+)", line)[1]) < 0.5
    assert float(re.search(r"Epoch Duration: ([\d.]+)", line)[1]) >= 1


def test_continue_flag_goes_on_with_the_checkpoints_settings_and_says_so(tmp_path: Path) -> None:
    loader = DataLoader(points(), batch_size=16)
    model, criterion, optimizer = prepare_model_for_training(
        new_model(), "cpu", 0.5, 0.9, 1e-3, False
    )
    train_model(model, "cpu", criterion, optimizer, 1, 2, loader, tmp_path / "log", tmp_path, False)
    straight = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.warns(
        UserWarning,
        match=r"lr 0\.5 \(not 0\.1\), momentum 0\.9 \(not 0\.8\), weight_decay 0\.001 \(not 0\.0\)",
    ):
        model, criterion, optimizer = prepare_model_for_training(
            new_model(), "cpu", 0.1, 0.8, 0.0, True, tmp_path / "Epoch_1.pt"
        )
    train_model(model, "cpu", criterion, optimizer, 2, 2, loader, tmp_path / "log", tmp_path, False)
    assert all(torch.equal(value, straight[key]) for key, value in model.state_dict().items())


def test_distribute_flag_and_task_flag_without_a_group(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no process group is open"):
        prepare_model_for_training(new_model(), "cpu", 0.1, 0.9, 0.0, False, distribute_flag=True)
    model, criterion, optimizer = prepare_model_for_training(
        new_model(), "cpu", 0.1, 0.9, 0.0, False
    )
    for flag, words in (
        ("PartTwo", "no process group is open"),
        ("ring", "'ring' must average the gradients, but no process group is open"),
        ("PartFour", "task_flag: got 'PartFour', give a strategy's name"),
    ):
        with pytest.raises(UserError, match=words):
            train_model(
                model,
                "cpu",
                criterion,
                optimizer,
                1,
                1,
                DataLoader(points()),
                tmp_path / "log",
                tmp_path,
                False,
                flag,
            )


def train_in_a_group(rank: int, folder: str) -> dict:
    """Train with each set of flags, evaluate on one rank alone, and make the commonest mistake.

    The mistake: both ranks train on the same samples.
    """
    results = {}
    for name, distribute, task in (
        ("gather", False, "PartOne"),
        ("all_reduce", False, "PartTwo"),
        ("ring", False, "ring"),
        ("ddp", True, ""),
    ):
        model, criterion, optimizer = prepare_model_for_training(
            new_model(), "cpu", 0.5, 0.9, 0.0, False, distribute_flag=distribute
        )
        sampler = DistributedSampler(points(), seed=1)
        loader = DataLoader(points(), batch_size=10, sampler=sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # each rank has its own samples: no warning
            model = train_model(
                model,
                "cpu",
                criterion,
                optimizer,
                1,
                2,
                loader,
                f"{folder}/{name}{rank}.txt",
                f"{folder}/{name}",
                distribute,
                task,
            )
        wraps = sum(isinstance(module, DistributedDataParallel) for module in model.modules())
        state = {
            key.removeprefix("module."): value.numpy() for key, value in model.state_dict().items()
        }
        results[name] = (wraps, sampler.epoch, state)
    if rank == 1:  # one rank alone must not communicate
        evaluate_model(
            model,
            "cpu",
            criterion,
            DataLoader(points(), batch_size=8),
            f"{folder}/by_rank1.txt",
            "none",
        )
    if rank == 0:
        evaluate_model(
            model,
            "cpu",
            criterion,
            DataLoader(points(), batch_size=8),
            f"{folder}/by_rank0.txt",
            "none",
        )

    model, criterion, optimizer = prepare_model_for_training(
        new_model(), "cpu", 0.5, 0.9, 0.0, False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_model(
            model,
            "cpu",
            criterion,
            optimizer,
            1,
            1,
            DataLoader(points(), batch_size=10),
            f"{folder}/same{rank}.txt",
            f"{folder}/same",
            False,
            "PartTwo",
        )
    results["warnings"] = [str(warning.message) for warning in caught]
    return results


def test_in_a_group(tmp_path: Path) -> None:
    first, second = run_ranks(2, train_in_a_group, str(tmp_path))
    for name, wraps in (("gather", 0), ("all_reduce", 0), ("ring", 0), ("ddp", 1)):
        assert first[name][0] == wraps, "DDP wraps once, and only where it was asked for"
        assert first[name][1] == 2, "set_epoch was called"
        for key, value in first[name][2].items():
            assert (value == second[name][2][key]).all()
            assert abs(value - first["gather"][2][key]).max() < 1e-6, (
                "all strategies train the same"
            )
        for rank in (0, 1):
            lines = (tmp_path / f"{name}{rank}.txt").read_text().splitlines()
            assert len(lines) == 2
            assert all(LINE.match(line) and line.startswith(f"Rank: {rank}, ") for line in lines)
        assert not any(
            key.startswith("module.")
            for key in load_checkpoint(tmp_path / name / "Epoch_2.pt")["model_state_dict"]
        )
    assert (tmp_path / "by_rank0.txt").exists()
    assert not (tmp_path / "by_rank1.txt").exists(), "only rank 0 writes"
    for one in (first, second):
        assert any("all ranks train on the same samples" in text for text in one["warnings"])


def test_a_report_without_predictions_or_with_other_lengths_is_refused(tmp_path: Path) -> None:
    for truth, prediction in (([], []), ([0, 1], [0])):
        with pytest.raises(UserError, match="as many predictions as labels"):
            generate_eval_report(truth, prediction, 0.0, tmp_path / "report.txt", "x.pt")


def test_a_report_counts_every_class_also_those_never_predicted(tmp_path: Path) -> None:
    result = generate_eval_report(
        [0, 1, 2, 2],
        [0, 0, 2, 2],
        1.25,
        tmp_path / "r.txt",
        "x.pt",
        class_names=["a", "b", "c", "d"],
    )
    assert result["confusion_matrix"] == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    assert result["accuracy"] == 0.75
    assert "1.2500" in (tmp_path / "r.txt").read_text()


def test_amp_on_a_cpu_without_fast_bf16_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.training_engine.amp.cpu_has_fast_bf16", lambda: False)
    dtype, notice = choose_amp(True, "fp16", default=True, device=torch.device("cpu"))
    assert dtype is None
    assert "runs in fp32" in notice
    assert choose_amp(None, "fp16", default=True, device=torch.device("cpu")) == (None, ""), (
        "off by default on a CPU"
    )
    monkeypatch.setattr("common.training_engine.amp.cpu_has_fast_bf16", lambda: True)
    assert choose_amp(True, "bf16", default=True, device=torch.device("cpu")) == (
        torch.bfloat16,
        "",
    )


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
    monkeypatch: pytest.MonkeyPatch,
    dtype: str | None,
    exact: bool,
    fast_bf16: bool,
    chosen: torch.dtype | None,
    notice: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: fast_bf16)
    gpu = torch.device("cuda")
    found, text = choose_amp(None, dtype, default=True, device=gpu, exact=exact)
    assert found == chosen
    assert notice in text
    assert bool(text) == bool(notice)


def test_a_part_on_gpus_trains_with_every_strategy_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    group = World(device=torch.device("cuda"), backend="nccl")
    chosen = {}
    for sync in BUILT_IN:
        config = parse_arguments("PartThree", "", {}, BUILT_IN, ["--sync", sync])
        assert config.amp_dtype is None
        chosen[sync] = Setup.amp.fget(SimpleNamespace(config=config, world=group))[0]
    assert chosen == {
        "ddp": torch.float16,
        "ddp_fp16": torch.bfloat16,
        "ddp_powersgd": torch.bfloat16,
        "ddp_zero1": torch.float16,
        "fsdp": torch.float16,
    }
    # Without a group, no strategy changes the gradients.
    alone = World(device=torch.device("cuda"))
    found = Setup.amp.fget(SimpleNamespace(config=config, world=alone))
    assert found == (torch.float16, "")


class SlowGradient(torch.autograd.Function):
    """Identity whose backward pass takes 0.3 s."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        import time

        time.sleep(0.3)  # must count as backward
        return gradient


class SlowBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(SlowGradient.apply(self.first(inputs)))


def timed_step(rank: int) -> dict:
    """Return the section times of a DDP step that rank 1 starts 2 s late.

    Rank 0 waits for it inside backward().
    """
    import time

    from common.training_engine import TrainingEngine

    model = SlowBackward()
    engine = TrainingEngine(model, "cpu", distributed=True, sync="ddp")
    engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    for _ in range(
        2
    ):  # DDP rearranges its buckets, with a message, at the start of the second step
        engine.train_step(
            [(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))], global_samples=8
        )
    engine.timer.take()
    time.sleep(2 * rank)  # rank 0 must see this delay
    engine.train_step([(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64))], global_samples=8)
    return engine.timer.seconds(engine.timer.take())


@pytest.mark.alone
def test_sync_is_what_is_exposed_after_the_last_gradient_also_for_ddp() -> None:
    waiting, late = run_ranks(2, timed_step)
    assert waiting["sync"] > 1.5, "rank 0 waits for rank 1 in sync, not in backward"
    assert 0.3 <= waiting["backward"] < 1.5
    assert late["sync"] < 1.5
