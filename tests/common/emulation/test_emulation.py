"""Emulated compute: times, order and gradients of a model that sleeps.

Other tests cover what stays real and what is refused.
"""

import json
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.config.parser import parse_arguments
from common.config.schema import Config
from common.emulation.compute_profile import Layer, Profile, SectionTime, load_profile, profile_path
from common.emulation.emulated_model import Emulation
from common.errors import UserError
from common.models import MODELS, build_model
from common.profiling.layer_timer import LayerTimer
from common.sync import STRATEGIES, build_sync
from common.sync.base import GradientSync
from common.training_engine import TrainingEngine
from lab.calibrate.layer_profile import measure_profile
from lab.compare.imported_runs import collect
from tests.helpers import TINY, free_port, only_run_folder, run_part, run_ranks, start_part

NOTHING = SectionTime(1e-8, 0.0)  # a profile must take some time


class Small(nn.Module):
    """Two layers with parameters and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.act(self.first(images)).mean(dim=(2, 3)))


def profile_of(
    model: nn.Module,
    *,
    forward: SectionTime = NOTHING,
    backward: SectionTime = NOTHING,
    update: float = 0.0,
) -> Profile:
    """Return a profile with the same times for every layer of ``model``."""
    layers = tuple(
        Layer(
            name,
            forward,
            backward,
            tuple(f"{name}.{own}" for own, _ in layer.named_parameters(recurse=False)),
        )
        for name, layer in model.named_modules()
        if not list(layer.children())
    )
    return Profile(
        "test", "a machine", "cpu", 1, "2026-11-23T12:00:00", "small", (8, 8), layers, update
    )


def emulated(model: nn.Module, rank: int = 0, **times) -> Emulation:
    return Emulation(model, profile_of(model, **times), rank=rank, classes=4)


def backward_pass(model: nn.Module, samples: int = 2) -> dict[str, Tensor]:
    """Return the gradients of one pass, each as it is when it becomes ready."""
    found: dict[str, Tensor] = {}
    hooks = [
        p.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient.clone()))
        for name, p in model.named_parameters()
    ]
    model(torch.zeros(samples, 3, 8, 8)).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


# --- times ---


def test_late_layers_are_made_up_for_and_times_follow_the_samples():
    """A hook takes 8 ms after each of 20 layers, and the emulation makes up for it.

    A chain that slept for each layer's full time would be 160 ms late.
    """
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    emulation = emulated(model, forward=SectionTime(0.0, 0.005), backward=SectionTime(0.01, 0.005))
    for p in list(model.parameters())[::2]:
        p.register_hook(lambda _: time.sleep(0.008))  # makes each layer late

    def right(forward, backward):
        return forward == pytest.approx(20 * 2 * 0.005, abs=0.04) and backward == pytest.approx(
            20 * (0.01 + 2 * 0.005), abs=0.09
        )

    taken = []
    while len(taken) < 2 or (
        len(taken) < 40 and not any(right(*times) for times in taken)
    ):  # a busy machine is sometimes late
        emulation.update()  # as in training; otherwise a step would make up for the previous one
        began = time.perf_counter()
        outputs = model(torch.zeros(2, 3))
        middle = time.perf_counter()
        outputs.sum().backward()
        taken.append((middle - began, time.perf_counter() - middle))
    assert outputs.shape == (2, 4)
    assert any(right(*times) for times in taken), taken
    assert all(forward + backward > 0.59 for forward, backward in taken)


def test_a_wait_in_a_forward_pre_hook_is_not_made_up_for():
    """A strategy waits there for weights. The hook of a layer inside another one runs, too."""
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)
    )
    emulated(model, forward=SectionTime(0.02, 0.0), backward=SectionTime(0.02, 0.0))
    waits, called = {"0": 0.05, "1.0": 0.1, "2": 0.0}, []
    for name, seconds in waits.items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name, seconds=seconds: (called.append(name), time.sleep(seconds))[0]
        )
    began = time.perf_counter()
    outputs = model(torch.zeros(2, 3))
    assert time.perf_counter() - began >= 4 * 0.02 + 0.15
    outputs.sum().backward()
    assert time.perf_counter() - began >= 8 * 0.02 + 0.15
    assert called == list(waits)


def test_an_update_of_a_part_of_the_weights_takes_that_part_of_the_time():
    emulation = emulated(Small(), update=0.4)
    began = time.perf_counter()
    emulation.update(0.25)
    assert 0.1 <= time.perf_counter() - began < 0.4


def test_the_update_begins_when_the_exchange_has_ended():
    """The update does not make up for the time of an exchange."""
    model = Small()
    emulation = emulated(model, forward=SectionTime(0.02, 0.0), update=0.05)
    backward_pass(model)
    time.sleep(0.1)  # past the deadline, which must not shorten the update
    began = time.perf_counter()
    emulation.update()
    assert time.perf_counter() - began >= 0.05
    began = time.perf_counter()
    model(torch.zeros(1, 3, 8, 8))
    assert time.perf_counter() - began >= 0.06


# --- gradients ---


class Written(TorchDispatchMode):
    """Records the entries of the largest tensor that an operation writes to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and "detach" not in str(func)
            and "as_strided" not in str(func)
        ):
            self.most = max(self.most, result.numel())
        return result


def test_gradients_cost_nothing_differ_and_have_the_parameters_strides():
    mine, others = Small().to(memory_format=torch.channels_last), Small()
    emulated(mine)
    emulated(others, rank=1)
    first = backward_pass(mine)
    assert set(first) == {name for name, _ in mine.named_parameters()}
    mine.zero_grad(set_to_none=True)
    images = torch.zeros(2, 3, 8, 8)
    with Written() as written:
        mine(images).sum().backward()
    assert 0 < written.most <= 8, (
        "no gradient is computed, filled or copied: the largest has 216 entries, the outputs 8"
    )
    second, foreign = {name: p.grad for name, p in mine.named_parameters()}, backward_pass(others)
    for name, p in mine.named_parameters():
        assert p.grad.stride() == p.stride(), name
        assert torch.isfinite(p.grad).all()
        assert not torch.equal(first[name], second[name]), f"{name}: the same in two steps"
        assert not torch.equal(second[name], foreign[name]), f"{name}: the same on two ranks"


def test_accumulated_gradients_are_sums_and_stay_finite():
    model = Small()
    emulated(model)
    # gradients that share memory would double in each step and overflow after 128
    for _ in range(300):
        model.zero_grad(set_to_none=True)
        one = backward_pass(model)
        other = backward_pass(model)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, one[name] + other[name], msg=name)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) < 10


def _ready_order(model: nn.Module) -> list[str]:
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: order.append(name.rpartition(".")[0])
        )
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    return list(dict.fromkeys(order))


class Shortcut(nn.Module):
    """A small model that is not a chain."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm, self.act = (
            nn.Conv2d(3, 8, 3, stride=4, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )
        self.branch, self.short, self.last = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.Linear(8, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(images)))
        return self.last((self.branch(x) + self.short(x)).mean(dim=(2, 3)))


@pytest.mark.parametrize(
    "name",
    [
        "shortcut",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("vgg11", "wide_resnet16_4", "resnet18")
        ),
    ],
)
def test_a_measured_profile_has_every_layer_in_true_order(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "shortcut", f"{__name__}:Shortcut")
    profile = measure_profile("trial", model=name, samples=(2, 4), rounds=1)
    profile.save(tmp_path / "trial.json")
    assert load_profile(str(tmp_path / "trial.json"), model=name) == profile
    assert profile.update_seconds > 0
    assert all(measured > 0 for _, measured, _ in profile.steps)
    model, sleeping = build_model(name, 10), build_model(name, 10)
    still = tuple(Layer(layer.name, NOTHING, NOTHING, layer.parameters) for layer in profile.layers)
    Emulation(sleeping, replace(profile, layers=still), rank=0, classes=10)
    assert _ready_order(sleeping) == _ready_order(model)
    assert list(profile.ready_seconds(8))[-1].rpartition(".")[0] == _ready_order(model)[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_profile_emulates_it_on_a_cpu(tmp_path):
    profile = measure_profile("gpu", model="vgg11", device="cuda", samples=(32, 256), rounds=2)
    assert profile.device == "cuda"
    assert profile.machine == torch.cuda.get_device_name(0)
    assert 0 < profile.forward_seconds(256) < max(profile.ready_seconds(256).values()) < 1
    Emulation(build_model("vgg11", 10), profile, rank=0, classes=10)


class Waits(torch.autograd.Function):
    """Takes the given seconds forward, and twice as long backward."""

    @staticmethod
    def forward(ctx, inputs, weight, seconds):
        time.sleep(seconds)  # this layer's forward time
        ctx.seconds, ctx.shape = seconds, weight.shape
        return inputs + weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)  # and its backward time
        return gradient, gradient.sum(dim=0), None


class Known(nn.Module):
    """A layer with a parameter and known times."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        return Waits.apply(inputs, self.weight, self.seconds)


class Residual(nn.Module):
    """Not a chain: the second layer's output is added to its input.

    The third layer runs twice, with an in-place operation in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = (
            Known(0.03),
            Known(0.06),
            Known(0.02),
            nn.ReLU(inplace=True),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.a(inputs)
        return self.c(self.act(self.c(first + self.b(first))))


def test_layers_are_timed_where_they_run_and_parameters_belong_to_the_call_that_ends_them():
    """Other work on the machine makes single times longer, so the shortest time counts."""
    model, criterion = Residual(), nn.CrossEntropyLoss()
    forward = [0.03, 0.06, 0.02, 0.0, 0.02, 0.0]
    expected = forward + [2 * seconds for seconds in forward]
    least = [math.inf] * len(expected)
    with LayerTimer(model, criterion, device="cpu") as timer:
        for _ in range(60):
            criterion(model(torch.randn(3, 4)), torch.zeros(3, dtype=torch.int64)).backward()
            calls, *seconds = timer.take()
            assert [(call.name, call.parameters) for call in calls] == [
                ("a", ("a.weight",)),
                ("b", ("b.weight",)),
                ("c", ("c.weight",)),
                ("act", ()),
                ("c", ()),
                ("loss", ()),
            ]
            least = [min(pair) for pair in zip(least, [*seconds[0], *seconds[1]], strict=True)]
            if least == pytest.approx(expected, abs=0.01):
                return
    raise AssertionError(f"{least}, not {expected}")


# --- what stays real ---


def _one_step(rank: int, names: tuple[str, ...]) -> dict[str, tuple]:
    """Return, by strategy, this rank's gradients before and after the exchange.

    The result also says whether the weights are unchanged, and holds the outcome of the step.
    """
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = Small().to(memory_format=torch.channels_last)
        before = [p.detach().clone() for p in model.parameters()]
        engine = TrainingEngine(model, "cpu", distributed=True, sync=build_sync(name))
        engine.emulation = emulated(model, rank)
        engine.prepare(torch.optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss())
        images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
        for _ in range(2):  # DDP and overlapped send from hooks in the second step
            made = {}
            hooks = [
                p.register_hook(
                    lambda gradient, key=key, made=made: made.__setitem__(
                        key, gradient.clone().numpy()
                    )
                )
                for key, p in model.named_parameters()
            ]
            outcome = engine.train_step([(images, labels)], global_samples=4)
            for hook in hooks:
                hook.remove()
        after = {key: mean_gradient(engine.sync, p).numpy() for key, p in model.named_parameters()}
        same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        found[name] = (
            same,
            made,
            after,
            float(outcome.numbers[0]),
            float(outcome.numbers[1]),
            outcome.trained,
        )
        engine.close()
    return found


def mean_gradient(sync: GradientSync, parameter: nn.Parameter) -> Tensor:
    """Return the mean gradient that this rank has; NaN in the parts that only other ranks have."""
    if parameter.grad is not None:
        return parameter.grad.clone()
    gradient = torch.full_like(parameter, torch.nan).detach()
    for bucket in sync._buckets:
        if segment := bucket.segments.get(parameter):
            flat = gradient.as_strided((parameter.numel(),), (1,))
            flat[segment.part] = segment.parameter.grad
    return gradient


def test_every_strategy_exchanges_the_gradients_that_the_ranks_made():
    # test_built_in.py has those of torch that keep no gradient after a step.
    left_out = ("none", "ddp_powersgd", "ddp_zero1", "fsdp")
    names = tuple(name for name in STRATEGIES if name not in left_out)
    ranks = run_ranks(2, _one_step, names)
    for name in names:
        exact = build_sync(name).exact
        for same, _, after, loss, correct, trained in (rank[name] for rank in ranks):
            assert same, f"{name}: nothing is learned"
            assert loss != loss
            assert correct != correct
            assert not trained
            for key, gradient in after.items() if exact else ():
                mean = (ranks[0][name][1][key] + ranks[1][name][1][key]) / 2
                here = ~np.isnan(gradient)
                assert gradient[here] == pytest.approx(mean[here], rel=1e-5, abs=1e-9), (name, key)
            whole = sum((~np.isnan(rank[name][2][key])).sum() for rank in ranks for key in after)
            copies = 1 if name == "sharded" else len(ranks)
            assert whole == copies * sum(gradient.size for gradient in after.values()), name
        assert any(
            (ranks[0][name][1][key] != ranks[1][name][1][key]).any() for key in ranks[0][name][1]
        )


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory):
    """Return the path of a profile of the tiny model."""
    tiny = profile_of(
        build_model("tiny", 10),
        forward=SectionTime(1e-4, 1e-5),
        backward=SectionTime(5e-3, 1e-5),
        update=1e-3,
    )
    path = tmp_path_factory.mktemp("profiles") / "fast.json"
    replace(tiny, model="tiny", image=(32, 32)).save(path)
    return path


SMALL = (*TINY, "--dataset", "digits", "--batch-size", 32, "--max-steps", 4, "--log-every", 1)


@pytest.mark.parametrize(
    ("part", "ranks", "sync"), [("PartOne", 0, "none"), ("PartTwo", 2, "gather_scatter")]
)
def test_a_run_shows_no_loss_and_says_that_it_is_emulated(
    part, ranks, sync, profile_file, tmp_path
):
    ended = run_part(
        part,
        "--compute",
        profile_file,
        *SMALL,
        "--accumulation-steps",
        2,
        "--output-dir",
        tmp_path,
        cwd=tmp_path,
        ranks=ranks,
    )
    assert [one.status for one in ended] == [0] * max(1, ranks), ended[0].err
    folder = only_run_folder(tmp_path, f"{part}-{sync}")
    logs = "".join(path.read_text() for path in folder.glob("logs_rank*.txt"))
    for text in (ended[0].out, logs):
        assert "EMULATED" in text
        for line in text.splitlines():
            assert "nan" not in line.lower()
            assert not re.search(r"(loss|accuracy)\b[^,]* \d", line.lower()), line
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["accuracy"], row["local_loss"]) for row in metrics] == [
        (None, None, None)
    ] * 4
    # A backward pass makes up for a late forward pass, so their sum counts.
    longest = max(row["forward_seconds"] + row["backward_seconds"] for row in metrics)
    assert longest > 0.055, "6 layers of 5 ms in each of two micro-batches"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["emulated"], summary["train_loss_last_step"], summary["test_accuracy"]) == (
        True,
        None,
        None,
    )
    assert summary["ranks_hold_equal_weights"]
    epochs = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    assert (
        {row["train_loss"] for row in epochs} == {row["val_accuracy"] for row in epochs} == {None}
    )
    assert json.loads((folder / "profile.json").read_text()) == json.loads(profile_file.read_text())
    reported = collect([folder], scaling="strong")
    assert reported["emulated"]
    assert reported["settings"]["compute"] == "test of 2026-11-23T12:00:00"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "report.txt").exists()


# --- what is refused ---


def test_ranks_with_other_profiles_are_refused(profile_file, tmp_path):
    content = json.loads(profile_file.read_text())
    other = tmp_path / "other" / "fast.json"
    other.parent.mkdir()
    other.write_text(json.dumps(content | {"update_seconds": 2e-3}))
    port, started = free_port(), []
    for rank, folder in enumerate(
        (profile_file.parent, other.parent)
    ):  # the same flag, different content
        started.append(
            start_part(
                "PartTwo",
                "--compute",
                "fast.json",
                *SMALL,
                "--output-dir",
                tmp_path,
                "--num-nodes",
                2,
                "--master-ip",
                "127.0.0.1",
                "--master-port",
                port,
                "--rank",
                rank,
                cwd=folder,
            )
        )
    for one in started:
        ended = one.end()
        assert ended.status == 1
        assert (
            "the ranks differ in the profile of --compute. update_seconds: 0.001 on rank 0, 0.002 "
            "on rank 1" in ended.err
        )


@pytest.mark.parametrize(
    "flags",
    [
        ("--validate",),
        ("--target-accuracy", "0.5"),
        ("--resume", "auto"),
        ("--ema",),
        ("--amp",),
        ("--checkpoint-every", "3"),
        ("--backend", "nccl"),
    ],
)
def test_contradicting_flags_are_refused(flags):
    with pytest.raises(UserError, match=rf"--compute measured .*leave.*{flags[0]}"):
        parse_arguments("PartTwo", "", {}, ("all_reduce",), ["--compute", "measured", *flags])


def _changed(path, **entries):
    return json.dumps(json.loads(path.read_text()) | entries)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no profile .*`lab calibrate --profile x --model vgg16` measures one"),
        ("{", "is cut off or not JSON"),
        ("[]", r"x.json: got \[\], expected an object"),
        ('{"format": 1}', "is not a compute profile"),
        ({"format": 9}, "has format 9, this version reads 1"),
        ({"layers": []}, "layers: got .* of length >= 1"),
        ({"update_seconds": -1}, "update_seconds: got -1, expected a number >= 0"),
        ({"model": "vgg11"}, "was measured for vgg11, but the model is vgg16"),
        ({"image": [64, 64]}, "images of 64x64, but the dataset has 32x32"),
    ],
)
def test_profiles_that_cannot_be_used(content, said, profile_file, tmp_path):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(
            content
            if isinstance(content, str)
            else _changed(profile_file, **{"model": "vgg16"} | content)
        )
    with pytest.raises(UserError, match=said):
        load_profile(str(path), model="vgg16", image=(32, 32))


def test_a_measured_profile_is_this_machines_own_and_each_model_has_one(
    profile_file, monkeypatch, tmp_path
):
    monkeypatch.setattr("common.emulation.compute_profile.REPORTS", tmp_path / "reports")
    path = profile_path("measured", model="vgg11")
    assert path == tmp_path / "reports" / "profiles" / "measured-vgg11.json"
    assert profile_path("measured", model="vgg16") != path
    with pytest.raises(UserError, match=r"there is no profile .*: `lab calibrate` measures one"):
        load_profile("measured", model="vgg11")
    path.parent.mkdir(parents=True)
    path.write_text(_changed(profile_file, model="vgg11", machine="a large one"))
    with pytest.raises(
        UserError,
        match=r"was measured on 'a large one', but this machine is 'a small one'.*give the file",
    ):
        load_profile("measured", model="vgg11", machine="a small one")
    assert load_profile(str(path), model="vgg11", machine="a small one").machine == "a large one"
    with pytest.raises(UserError, match=r"--compute: got '../x', give real, measured"):
        profile_path("../x", model="vgg11")


def test_a_model_with_other_parameters_is_refused():
    model = Small()
    profile = profile_of(model)
    model.second = nn.Linear(8, 4, bias=False)
    with pytest.raises(
        UserError, match=r"differ from this small's \(1, the first is second\.bias\)"
    ):
        Emulation(model, profile, rank=0, classes=4)
    model = Small()
    model.first.requires_grad_(False)
    with pytest.raises(UserError, match=r"2, the first is first\.bias"):
        Emulation(model, profile, rank=0, classes=4)


def test_real_is_the_default():
    assert (Config(part="PartOne").emulated, Config(part="PartOne").only_times) == (False, False)
    assert Config(part="PartOne", compute="measured").only_times
