"""Emulated compute: times, order and gradients of a model that sleeps."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.config.parser import parse_arguments
from common.emulation.compute_profile import Layer, Profile, SectionTime, load_profile, profile_path
from common.emulation.emulated_model import Emulation
from common.errors import UserError
from common.models import build_model
from common.profiling.comm_trace import MessageRecorder
from common.sync import STRATEGIES
from common.training_engine.batchnorm import synchronise_batchnorm
from common.utils.hashing import digest
from lab.compare.imported_runs import collect
from tests.helpers import TINY, free_port, only_run_folder, run_part, run_ranks, start_part
from tests.helpers.engines import prepared, sgd
from tests.helpers.records import json_lines, json_of

NOTHING = SectionTime(0.0, 0.0)


class Small(nn.Module):
    """Two layers with parameters and one without."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, images):
        return self.second(self.act(self.first(images)).mean(dim=(2, 3)))


def profile_of(model, *, forward=NOTHING, backward=NOTHING, update=0.0):
    """Return a profile with the same times for every layer of ``model``."""
    layers = tuple(
        Layer(name, forward, backward, tuple(f"{name}.{own}" for own in layer._parameters))
        for name, layer in model.named_modules()
        if not list(layer.children())
    )
    where = ("test", "a machine", "cpu", 1, "2026-11-23T12:00:00")
    return Profile(*where, "small", (8, 8), layers, update)


def emulated(model, rank=0, **times):
    return Emulation(model, profile_of(model, **times), rank=rank, classes=4)


def backward_pass(model, samples=2):
    """Return the gradients of one pass, each as it is when it becomes ready."""
    found = {}
    hooks = [
        p.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient.clone()))
        for name, p in model.named_parameters()
    ]
    model(torch.zeros(samples, 3, 8, 8)).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


def test_late_layers_are_made_up_for_and_times_follow_the_samples():
    """Hooks take 8 ms after each of 20 layers; a busy machine needs several tries."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    emulation = emulated(model, forward=SectionTime(0.0, 0.005), backward=SectionTime(0.01, 0.005))
    for p in list(model.parameters())[::2]:
        p.register_hook(lambda _: time.sleep(0.008))  # makes each layer late
    taken = []
    for _ in range(40):
        emulation.update()  # as in training; otherwise a step would make up for the previous one
        began = time.perf_counter()
        outputs = model(torch.zeros(2, 3))
        middle = time.perf_counter()
        outputs.sum().backward()
        forward, backward = middle - began, time.perf_counter() - middle
        taken.append((forward, backward))
        assert outputs.shape == (2, 4)
        assert forward + backward > 0.59
        if forward == pytest.approx(0.2, abs=0.04) and backward == pytest.approx(0.4, abs=0.09):
            return
    raise AssertionError(taken)


def test_a_wait_in_a_forward_pre_hook_is_not_made_up_for():
    """A strategy waits there for weights. The hook of a layer inside another one runs, too."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 3))
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


def messages_of_a_step(rank):
    """Return the messages with SyncBatchNorm of a real step and of an emulated one."""
    found = []
    for is_emulated in (False, True):
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten())
        model.append(nn.Linear(180, 4))
        engine = prepared(model, "all_reduce_flat")
        if is_emulated:
            engine.emulation = emulated(model, rank)
        batch = (torch.randn(2 + rank, 3, 8, 8), torch.zeros(2 + rank, dtype=torch.int64))
        for recorder in (MessageRecorder(), MessageRecorder()):
            with recorder:
                engine.train_step([batch], global_samples=5)
        recorder.finish()
        engine.close()
        found.append([(message.kind, message.bytes) for message in recorder.messages])
    return found


def test_an_emulated_step_sends_the_messages_of_syncbatchnorm():
    for real, emulation in run_ranks(2, messages_of_a_step):
        assert emulation == real
        assert ("all_reduce", 8 * (2 * 5 + 1)) in real
        assert ("all_reduce", 4 * 2 * 5) in real


def waiting_for_the_other_rank(rank):
    """Return the seconds of forward on a rank whose peer is 0.2 s late in BatchNorm."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(180, 4))
    synchronise_batchnorm(model, ours=True)
    emulated(model, rank, forward=SectionTime(0.05, 0.0))
    dist.barrier()
    began = time.perf_counter()
    if rank == 1:
        time.sleep(0.2)
    model(torch.zeros(2, 3, 8, 8))
    return time.perf_counter() - began


def test_a_wait_in_syncbatchnorm_is_not_made_up_for():
    """Four layers of 0.05 s, two of them before and two after the wait."""
    for seconds in run_ranks(2, waiting_for_the_other_rank):
        assert seconds >= 0.2 + 4 * 0.05 - 0.005


def test_the_update_begins_when_the_exchange_has_ended_and_takes_its_share_of_the_time():
    """The update does not make up for the time of an exchange, nor the next step for the update."""
    model = Small()
    emulation = emulated(model, forward=SectionTime(0.02, 0.0), update=0.4)
    backward_pass(model)
    time.sleep(0.1)  # past the deadline, which must not shorten the update
    began = time.perf_counter()
    emulation.update(0.25)
    assert 0.1 <= time.perf_counter() - began < 0.4
    began = time.perf_counter()
    model(torch.zeros(1, 3, 8, 8))
    assert time.perf_counter() - began >= 0.06


class Written(TorchDispatchMode):
    """Records the entries of the largest tensor that an operation writes to new memory."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = "detach" in str(func) or "as_strided" in str(func)
        if isinstance(result, Tensor) and not is_view:
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
    # The largest gradient has 216 entries, the outputs 8.
    assert 0 < written.most <= 8, "no gradient is computed, filled or copied"
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


def one_step(rank, names):
    """Compare each strategy's gradients with the mean of those that the ranks made."""
    for name in names:
        torch.manual_seed(0)
        model, made = Small().to(memory_format=torch.channels_last), {}
        before, emulation = digest(model.state_dict()), emulated(model, rank)
        engine = prepared(model, name, optimizer=sgd(model, lr=1.0))
        engine.emulation = emulation
        for p in model.parameters():
            p.register_hook(lambda gradient, p=p, made=made: made.update({p: gradient.clone()}))
        batch = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
        for _ in range(2):  # DDP and overlapped send from hooks in the second step
            loss, _, correct, *_ = engine.train_step([batch], global_samples=4)
        assert math.isnan(loss)
        assert math.isnan(correct)
        assert digest(model.state_dict()) == before, f"{name}: nothing is learned"
        for p, own in made.items():
            mean = own.contiguous() / 2
            dist.all_reduce(mean)
            assert not torch.equal(mean, own), "each rank makes its own"
            if engine.sync.exact:
                torch.testing.assert_close(p.grad, mean, rtol=1e-5, atol=1e-9)
        engine.close()


def test_every_strategy_exchanges_the_gradients_that_the_ranks_made():
    # The others keep no gradient after a step: test_built_in.py and test_sharded.py have them.
    left_out = ("none", "ddp_powersgd", "ddp_zero1", "fsdp", "sharded")
    run_ranks(2, one_step, [name for name in STRATEGIES if name not in left_out])


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory):
    """Return the path of a profile of the tiny model."""
    times = {"forward": SectionTime(1e-4, 1e-5), "backward": SectionTime(5e-3, 1e-5)}
    tiny = profile_of(build_model("tiny", 10), **times, update=1e-3)
    path = tmp_path_factory.mktemp("profiles") / "fast.json"
    replace(tiny, model="tiny", image=(32, 32)).save(path)
    return path


SMALL = (*TINY, "--dataset", "digits", "--batch-size", 32, "--max-steps", 4, "--log-every", 1)


def test_a_run_shows_no_loss_and_says_that_it_is_emulated(profile_file, tmp_path):
    flags = ("--compute", profile_file, *SMALL, "--accumulation-steps", 2, "--output-dir", tmp_path)
    ended = run_part("PartTwo", *flags, cwd=tmp_path, ranks=2)
    assert [one.status for one in ended] == [0, 0], ended[0].err
    folder = only_run_folder(tmp_path, "PartTwo-gather_scatter")
    logs = "".join(path.read_text() for path in folder.glob("logs_rank*.txt"))
    for text in (ended[0].out, logs):
        assert "EMULATED" in text
        for line in text.splitlines():
            assert "nan" not in line.lower()
            assert not re.search(r"(loss|accuracy)\b[^,]* \d", line.lower()), line
    metrics, epochs = (json_lines(folder / f"{name}.jsonl") for name in ("metrics", "epochs"))
    learned = [(row["loss"], row["accuracy"], row["local_loss"]) for row in metrics]
    assert learned == [(None, None, None)] * 4
    assert {row[name] for row in epochs for name in ("train_loss", "val_accuracy")} == {None}
    # A backward pass makes up for a late forward pass, so their sum counts.
    longest = max(row["forward_seconds"] + row["backward_seconds"] for row in metrics)
    assert longest > 0.055, "6 layers of 5 ms in each of two micro-batches"
    summary = json_of(folder, "summary")
    assert summary["emulated"]
    assert summary["ranks_hold_equal_weights"]
    assert summary["train_loss_last_step"] is summary["test_accuracy"] is None
    assert json_of(folder, "profile") == json.loads(profile_file.read_text())
    reported = collect([folder], scaling="strong")
    assert reported.emulated
    assert reported.settings["compute"] == "test of 2026-11-23T12:00:00"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "report.txt").exists()


def test_ranks_with_other_profiles_are_refused(profile_file, tmp_path):
    """They give the same flag, but its file has another content on each rank."""
    (tmp_path / "fast.json").write_text(_changed(profile_file, update_seconds=2e-3))
    group = ("--num-nodes", 2, "--master-ip", "127.0.0.1", "--master-port", free_port())
    flags = ("--compute", "fast.json", *SMALL, "--output-dir", tmp_path, *group)
    started = [
        start_part("PartTwo", *flags, "--rank", rank, cwd=folder)
        for rank, folder in enumerate((profile_file.parent, tmp_path))
    ]
    for one in started:
        ended = one.end()
        assert ended.status == 1
        assert "--compute. update_seconds: 0.001 on rank 0, 0.002 on rank 1" in ended.err


@pytest.mark.parametrize(
    "flags",
    [
        *(("--validate",), ("--target-accuracy", "0.5"), ("--resume", "auto"), ("--ema",)),
        *(("--amp",), ("--checkpoint-every", "3"), ("--backend", "nccl")),
    ],
)
def test_contradicting_flags_are_refused(flags):
    with pytest.raises(UserError, match=rf"--compute measured .*leave.*{flags[0]}"):
        parse_arguments("PartTwo", "", ("all_reduce",), ["--compute", "measured", *flags])


def _changed(path, **entries):
    return json.dumps(json.loads(path.read_text()) | entries)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file.*`lab calibrate --profile x --model vgg16` measures one"),
        ('{"format": 1}', "is not a compute profile"),
        ({"format": 9}, "has format 9, this version reads 1"),
        ({"update_seconds": -1}, "update_seconds: Expected float >= 0"),
        ({"model": "vgg11"}, "was measured for vgg11, but the model is vgg16"),
        ({"image": [64, 64]}, "images of 64x64, but the dataset has 32x32"),
    ],
)
def test_profiles_that_cannot_be_used(content, said, profile_file, tmp_path):
    path = tmp_path / "x.json"
    if isinstance(content, dict):
        content = _changed(profile_file, **{"model": "vgg16"} | content)
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        load_profile(str(path), model="vgg16", image=(32, 32))


def test_a_measured_profile_is_this_machines_own_and_each_model_has_one(
    profile_file, monkeypatch, tmp_path
):
    monkeypatch.setattr("common.emulation.compute_profile.REPORTS", tmp_path / "reports")
    path = profile_path("measured", model="vgg11")
    assert path == tmp_path / "reports" / "profiles" / "measured-vgg11.json"
    assert profile_path("measured", model="vgg16") != path
    missing = r"the profile .*No such file.*: `lab calibrate` measures one"
    with pytest.raises(UserError, match=missing):
        load_profile("measured", model="vgg11")
    path.parent.mkdir(parents=True)
    path.write_text(_changed(profile_file, model="vgg11", machine="a large one"))
    other = r"was measured on 'a large one', but this machine is 'a small one'.*give the file"
    with pytest.raises(UserError, match=other):
        load_profile("measured", model="vgg11", machine="a small one")
    assert load_profile(str(path), model="vgg11", machine="a small one").machine == "a large one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.second, "bias", None), r"1, the first is second\.bias"),
        (lambda model: model.first.requires_grad_(False), r"2, the first is first\.bias"),
    ],
)
def test_a_model_with_other_parameters_is_refused(change, message):
    model = Small()
    profile = profile_of(model)
    change(model)
    with pytest.raises(UserError, match=message):
        Emulation(model, profile, rank=0, classes=4)
