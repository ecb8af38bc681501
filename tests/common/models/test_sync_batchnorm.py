"""SyncBatchNorm on ranks of unequal batches is BatchNorm on all of them together."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.models import build_model
from common.models.sync_batchnorm import MessageGroup, SyncBatchNorm
from common.profiling.comm_trace import MessageRecorder
from common.sync import build_sync
from lab.proofs.equivalence import parameter_errors
from tests.helpers import RankError, run_ranks
from tests.helpers.engines import prepared
from tests.helpers.strategies import EXACT, SGD

CHANNELS = 5
KINDS = {
    "plain": {},
    "without weight and bias": {"affine": False},
    "without running statistics": {"track_running_stats": False},
    "mean over all batches": {"momentum": None},
}
SHARES = [(3, 2), (4, 0), (2, 3, 1), (5, 0, 0, 1, 2)]  # samples of each rank


def relative(found, right):
    """Return the greatest difference, relative to the greatest number."""
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).abs().max() / right.abs().max()) if found.numel() else 0.0


def total(tensor):
    """Return the sum over the ranks."""
    summed = tensor.detach().clone()
    dist.all_reduce(summed)
    return summed


def errors(rank, shares, options, *, dtype=torch.float64, offset=0.0, format=None):
    """Return the relative errors of two training steps and an evaluation, by what is compared."""
    torch.manual_seed(0)
    batch = offset + torch.randn(sum(shares), CHANNELS, 4, 3, dtype=torch.float64)
    arriving = torch.randn(batch.shape, dtype=torch.float64)
    whole = nn.BatchNorm2d(CHANNELS, **options).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.uniform_(0.5, 1.5)
    wide = torch.promote_types(dtype, torch.float32)
    layer = SyncBatchNorm.in_place_of(copy.deepcopy(whole).to(wide), MessageGroup())
    found = {}
    for step in (1, 2):
        all_values = batch.to(dtype).double().clone().requires_grad_()
        expected = whole(all_values)
        whole.zero_grad()
        expected.backward(arriving)
        own = batch.to(dtype).split(shares)[rank].clone()
        if format is not None:
            own = own.to(memory_format=format)
        own.requires_grad_()
        layer.zero_grad()
        normalised = layer(own)
        normalised.backward(arriving.to(dtype).split(shares)[rank])
        assert normalised.dtype == own.grad.dtype == dtype
        found[f"output {step}"] = relative(normalised, expected.split(shares)[rank])
        found[f"input's gradient {step}"] = relative(own.grad, all_values.grad.split(shares)[rank])
        for name, parameter in layer.named_parameters():
            right = whole.get_parameter(name)
            found[f"gradient of {name} {step}"] = relative(total(parameter.grad), right.grad)
    for name, buffer in layer.named_buffers():
        found[name] = relative(buffer, whole.get_buffer(name))
    if layer.track_running_stats:
        evaluated = batch.to(wide)[:3]
        found["evaluation"] = relative(layer.eval()(evaluated), whole.eval()(evaluated.double()))
    return found


def all_errors(rank, shares):
    cases = {name: errors(rank, shares, options) for name, options in KINDS.items()}
    cases["channels last"] = errors(rank, shares, {}, format=torch.channels_last)
    return cases


@pytest.mark.parametrize("shares", SHARES)
def test_equals_batchnorm_on_the_whole_batch(shares):
    for rank, cases in enumerate(run_ranks(len(shares), all_errors, shares)):
        for case, found in cases.items():
            for what, error in found.items():
                assert error <= 1e-13, f"{case}: {what} on rank {rank} is off by {error:.1e}"


def rounded_errors(rank, shares):
    far = errors(rank, shares, {}, dtype=torch.float32, offset=1000.0)
    coarse = errors(rank, shares, {}, dtype=torch.bfloat16)
    return max(far.values()), max(coarse.values())


def test_a_mean_of_1000_deviations_in_float32_and_bf16_lose_no_more_than_their_rounding():
    """Numbers near 1000 are spaced 6e-5 apart; the sums of squares alone would lose all digits."""
    for far, coarse in run_ranks(2, rounded_errors, (3, 2)):
        assert far <= 2e-4
        assert coarse <= 1e-2


def gradcheck(rank):
    layer = SyncBatchNorm.in_place_of(nn.BatchNorm1d(3).double(), MessageGroup())
    values = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def normalise(values, weight, bias):
        layer.weight.data, layer.bias.data = weight, bias
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, values)

    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(3, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(normalise, (values, weight, bias))


def test_gradients_are_those_of_differences():
    assert run_ranks(1, gradcheck) == [True]


def messages(rank):
    """Return the bytes that this rank sends; on two ranks those of each message."""
    layer = SyncBatchNorm.in_place_of(nn.BatchNorm2d(CHANNELS), MessageGroup())
    with MessageRecorder() as recorder:
        layer(torch.randn(2, CHANNELS, 3, 3, requires_grad=True)).sum().backward()
    return [round(message.sent_bytes) for message in recorder.messages]


def test_one_message_forward_and_one_backward():
    assert run_ranks(2, messages) == [[8 * (2 * CHANNELS + 1), 4 * 2 * CHANNELS]] * 2


def too_few(rank):
    layer = SyncBatchNorm.in_place_of(nn.BatchNorm1d(3), MessageGroup())
    layer(torch.randn(1 - rank, 3))


def test_a_single_value_is_refused():
    with pytest.raises(RankError, match=r"two values of each channel.* all ranks have 1"):
        run_ranks(2, too_few)


# --- in training ---


def vgg11_errors(rank, shares, strategies, steps):
    """Train VGG-11 in float64; return each strategy's error from one process."""
    generator = torch.Generator().manual_seed(3)
    batches = []  # of each step, the whole batch
    for _ in range(steps):
        images = torch.randn(sum(shares), 3, 32, 32, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 10, (sum(shares),), generator=generator)
        batches.append((images, labels))
    torch.manual_seed(100)
    whole = build_model("vgg11", 10).double()
    begun = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), **SGD)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(images), labels).backward()
        optimizer.step()
    found = {}
    for name in strategies:
        model = copy.deepcopy(begun)
        engine = prepared(model, name, optimizer=torch.optim.SGD(model.parameters(), **SGD))
        own = [(i.split(shares)[rank], labels.split(shares)[rank]) for i, labels in batches]
        engine.train_epoch(own, epoch=1)
        engine.agree_on_buffers()
        engine.close()
        # a convolution's bias before BatchNorm has the true gradient 0
        found[name] = max(parameter_errors(model, whole, floor=1e-3).values())
    return found


def check_vgg11(shares, strategies, *, steps):
    found = run_ranks(len(shares), vgg11_errors, shares, strategies, steps, timeout_seconds=800)
    for by_name in found:
        for name, error in by_name.items():
            assert error <= 1e-9, f"{name} is off by {error:.1e}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vgg11_with_batchnorm_equals_one_process():
    """The assignment's strategies: weights and running statistics after two steps."""
    check_vgg11((2, 1, 2), ["gather_scatter", "all_reduce", "ddp"], steps=2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shares", [(3, 2), (2, 3, 2), (2, 1, 3, 0, 2)])
def test_vgg11_with_every_exact_strategy_equals_one_process(shares):
    whole = [name for name in EXACT if name != "fsdp"]  # it keeps parts on each rank
    check_vgg11(shares, whole, steps=4)


def sections(rank):
    """Return a step's sections where rank 1 reaches BatchNorm 0.2 s late, by the timer of each."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    engine = prepared(model, "all_reduce_flat")
    batch = (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    engine.train_step([batch], global_samples=8)
    engine.timer.take()
    if rank == 1:
        model[1].register_forward_pre_hook(lambda *_: time.sleep(0.2))
    engine.train_step([batch], global_samples=8)
    taken = engine.timer.take()
    engine.close()
    return len(taken["sync"]), engine.timer.seconds(taken)


def test_waits_for_other_ranks_are_exposed_communication():
    """One in forward, one in backward, before the exchange and what comes after the update."""
    waiting, late = run_ranks(2, sections)
    for parts, seconds in (waiting, late):
        assert parts == 4
        assert all(value >= 0 for value in seconds.values())
    assert waiting[1]["sync"] >= 0.19
    assert late[1]["forward"] >= 0.19


class OnlyOnRank0(nn.Module):
    """A network whose layer after BatchNorm only rank 0 uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.extra = nn.Linear(3, 3)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs))
        return self.extra(hidden) if dist.get_rank() == 0 else hidden


def order_of_messages(rank):
    """Return the messages of the second step, in the order in which this rank sends them."""
    torch.manual_seed(0)
    model = OnlyOnRank0()
    engine = prepared(model, build_sync("overlapped", bucket_mb=1e-5))
    batch = (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    for recorder in (MessageRecorder(), MessageRecorder()):
        with recorder:
            engine.train_step([batch], global_samples=8)
    recorder.finish()
    engine.close()
    return [(message.kind, message.bytes) for message in recorder.messages]


def test_all_ranks_send_the_messages_of_both_groups_in_one_order():
    """NCCL may wait for ever if they do not."""
    first, second = run_ranks(2, order_of_messages)
    assert len(first) > 4
    assert first == second
