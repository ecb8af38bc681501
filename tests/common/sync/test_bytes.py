"""Each strategy sends exactly what it says, byte for byte.

Pairs and triples are real. In groups of 4, 5 and 64 each rank runs alone in torch's "fake" process
group, which sends nothing and waits for nobody: enough for what a rank itself sends.
"""

import functools
import pickle
from collections import Counter
from fractions import Fraction
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.models import build_model
from common.profiling.comm_trace import MessageRecorder
from common.sync import STRATEGIES, build_message_plan_from, build_sync, hierarchical, plan_class
from common.sync.bucketing import MIB, assign_buckets, bucket_sizes
from common.sync.message_cost import GradientSize, tree_children
from common.sync.node_layout import NodeLayout
from common.sync.plans.base import MessagePlan
from common.sync.plans.links import link_bytes
from tests.helpers import run_ranks
from tests.helpers.strategies import Mixed, Odd

FAKE = {4: range(4), 5: range(5), 64: (0, 1, 31, 32, 62, 63)}
"""By the number of ranks in a fake group: the ranks that run there."""
BY_MESSAGES = [name for name in STRATEGIES if plan_class(name).sends is not MessagePlan.sends]
"""Their operations describe the longest path; the messages of a rank differ."""


class Tiny(nn.Module):
    """A model with two entries, so that there can be more ranks than entries."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, images):
        return images.mean(dim=(1, 2, 3))[:, None] * self.weight


MODELS = {"odd": Odd, "tiny": Tiny, "mixed": Mixed}
# test_built_in.py has fsdp; without an option hierarchical's plan does not know the nodes.
CASES = [(name, {}) for name in STRATEGIES if name not in ("none", "fsdp", "hierarchical")] + [
    ("hierarchical", {"ranks_per_node": 1}),
    ("hierarchical", {"ranks_per_node": 2}),
    ("overlapped", {"bucket_mb": 0.002}),
    ("sharded", {"bucket_mb": 0.002}),
    ("ddp", {"bucket_mb": 0.002}),
    ("ddp_fp16", {"bucket_mb": 0.002}),
    ("ddp", {"bucket_mb": 0.002, "find_unused_parameters": True}),
    ("ddp_powersgd", {"powersgd_rank": 3}),
    ("ddp_powersgd", {"find_unused_parameters": True}),
    ("topk", {"topk_ratio": 0.3}),
    ("local_sgd", {"averaging_period": 3}),
]
EVERY = range(len(CASES))
# In a fake group DDP's reducer waits for results that never come.
HAND_WRITTEN = [index for index, (name, _) in enumerate(CASES) if not name.startswith("ddp")]


def pairs(size):
    """Return the node of each rank, if two share one."""
    return [rank // 2 for rank in range(size)]


def by_node(size):
    """Return the ranks of each node, if two share one."""
    return [set(range(first, min(first + 2, size))) for first in range(0, size, 2)]


def recorded(rank, sync, model):
    """Return kind, bytes, sent bytes and scope of each message of one period, once they repeat."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = sync.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(rank)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            training(torch.randn(4, 3, 5, 5, generator=generator)).square().sum().backward()
            sync.synchronize(model)
            optimizer.step()
            sync.after_step(model)

    # DDP's messages are final after its third step, those of other strategies after the first.
    steps(max(3, sync.plan.period))
    recorder = MessageRecorder(nodes=pairs(dist.get_world_size()))
    sync.recording = recorder.for_thread
    with recorder:
        steps(sync.plan.period)
    sync.close()
    return [(sent.kind, sent.bytes, sent.sent_bytes, sent.scope) for sent in recorder.messages]


def every_case(rank, cases=EVERY):
    found = {}
    for kind, model in MODELS.items():
        for index in cases:
            name, options = CASES[index]
            torch.manual_seed(0)
            found[kind, index] = recorded(rank, build_sync(name, **options), model())
    return found


def split_rings(messages, size):
    """Return the reduce_scatters that threads send as rings, in any order, and other messages."""
    sent, received = (
        sorted(("reduce_scatter", size * nbytes) for kind, nbytes in messages if kind == end)
        for end in ("send", "recv")
    )
    others = [one for one in messages if one[0] not in ("send", "recv")]
    assert sent == received
    counted = Counter(sent)
    assert all(count % (size - 1) == 0 for count in counted.values()), "a ring has N-1 sends"
    return sorted(one for one in counted for _ in range(counted[one] // (size - 1))), others


@functools.cache
def messages(size):
    """Return the messages by rank, computed once for all tests."""
    if size in FAKE:
        return {rank: alone(rank, size) for rank in FAKE[size]}
    return dict(enumerate(run_ranks(size, every_case)))


def alone(rank, size):
    """Return what one rank of many sends, if nothing ever arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        # A fake group has no timeout that the groups of the nodes could take.
        with mock.patch.object(hierarchical, "open_group_of", opened):
            return every_case(rank, HAND_WRITTEN)
    finally:
        dist.destroy_process_group()


def opened(ranks):
    """Open a fake group of these ranks; None for a single rank and on a rank that is not in it."""
    group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
    return group if isinstance(group, dist.ProcessGroup) else None


def sends_to_others(members, rank):
    """Return whether a rank takes part in an operation, with others."""
    return rank in members and len(members) > 1


IDS = [f"{name}-{'-'.join(map(str, options))}".rstrip("-") for name, options in CASES]


def _marks(size):
    return [pytest.mark.slow] if size in (4, 64) else []


SIZES_AND_CASES = [
    pytest.param(size, index, id=f"{size}-{name}", marks=_marks(size))
    for index, name in enumerate(IDS)
    for size in (2, 3, *(FAKE if index in HAND_WRITTEN else ()))
]


@pytest.mark.parametrize(("size", "index"), SIZES_AND_CASES)
@pytest.mark.parametrize("kind", MODELS)
def test_bytes_sent_are_the_payload_of_the_messages(size, kind, index):
    name, options = CASES[index]
    plan = build_message_plan_from(name, options)
    sizes = GradientSize.of(MODELS[kind]().parameters())
    for rank, found in messages(size).items():
        real = found[kind, index]
        sent = sum(sent for _, _, sent, _ in real)
        assert float(plan.bytes_sent(sizes, rank, size)) == pytest.approx(sent, rel=1e-12), real
        if name.startswith("ddp") and (kind == "mixed" or "bucket_mb" in options):
            continue  # torch chooses the order of types, and backward the order within a layer
        if name not in BY_MESSAGES:
            listed = [
                (one.kind, int(one.nbytes))
                for one in plan.operations(sizes, size)
                if sends_to_others(plan.members(one.among, rank, size), rank)
            ]
            in_rings, others = split_rings([(what, nbytes) for what, nbytes, *_ in real], size)
            planned_rings = [one for one in listed if one[0] == "reduce_scatter"]
            assert in_rings == sorted(planned_rings)
            assert others == [one for one in listed if one not in planned_rings]
    if name in BY_MESSAGES:
        longest = max(sent for _, _, sent, _ in messages(size)[0][kind, index])
        assert longest <= max(one.nbytes for one in plan.operations(sizes, size)) <= sum(sizes)


@pytest.mark.parametrize("name", [*BY_MESSAGES, "hierarchical"])
@pytest.mark.parametrize("size", [pytest.param(size, marks=_marks(size)) for size in (2, 3, *FAKE)])
def test_what_leaves_a_node_is_what_the_plan_says_of_its_link(size, name):
    """With two ranks on a node: point-to-point messages, and collectives among leaders alone."""
    index = next(i for i, (case, options) in reversed([*enumerate(CASES)]) if case == name)
    plan = build_message_plan_from(name, CASES[index][1])
    sizes = GradientSize.of(Odd().parameters())
    links = link_bytes(plan, sizes, NodeLayout.even(size, 2))
    left = [0.0 for _ in links]
    for rank, found in messages(size).items():
        for _, _, sent, scope in found["odd", index]:
            left[pairs(size)[rank]] += sent if scope == "between" else 0.0
    known = [node for node, ranks in enumerate(by_node(size)) if messages(size).keys() >= ranks]
    assert len(known) >= min(2, len(links))
    for node in known:
        assert left[node] == pytest.approx(float(links[node][0]), rel=1e-12)
    assert (sum(left) > 0) == (len(links) > 1)


@pytest.mark.parametrize(
    "name",
    [name for name in STRATEGIES if name not in ("none", "ddp_powersgd", "topk", "local_sgd")],
)
def test_the_docstrings_formulas_for_four_ranks(name):
    """One tensor of M = 4,000 bytes in 4-byte entries; fp16 sends half."""
    sizes, whole = [GradientSize((1000,))], 4000
    plan = build_message_plan_from(name, {})
    root, other = (plan.bytes_sent(sizes, rank, 4) for rank in (0, 3))
    ring = Fraction(2 * 3 * whole, 4)
    expected = {  # of rank 0 and of rank 3, where they differ from a ring's
        "gather_scatter": (3 * whole, whole),
        "gather_scatter_flat": (3 * whole, whole),
        "reduce_broadcast": (Fraction(3 * whole, 4) + 2 * whole, whole),
        "tree": (2 * whole, whole),
        "ddp_fp16": (ring / 2, ring / 2),
        "ddp_zero1": (ring * 3 / 2, ring * 3 / 2),
        "fsdp": (2 * ring, 2 * ring),
    }
    assert (root, other) == expected.get(name, (ring, ring))
    assert plan.bytes_sent(sizes, 0, 1) == 0


def test_vgg11_with_powersgd_sends_what_the_docstring_says():
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    assert sum(sizes) == 36_924_456
    plan = build_message_plan_from("ddp_powersgd", {})
    assert sum(one.nbytes for one in plan.operations(sizes, 2)) == 220_752


BUCKETS = {None: [9.5, 27.2, 0.3], 25: [28.3, 8.6], 4.5: None}
"""By bucket_mb, the bucket sizes in MB that docstrings state."""


def torchs_buckets(rank):
    """Return the sizes of torch's own buckets, reported from step 3, and their parameters."""
    found = {}
    for bucket_mb in BUCKETS:
        sync, model = build_sync("ddp", bucket_mb=bucket_mb), build_model("vgg11", 10)
        wrapped = sync.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            wrapped(torch.randn(2, 3, 32, 32)).sum().backward()
        logged = wrapped._get_ddp_logging_data()
        sizes = [int(size) for size in logged["rebuilt_bucket_sizes"].split(", ")]
        buckets = logged["rebuilt_per_bucket_param_indices"].split(", ")
        found[bucket_mb] = sizes, [[int(i) for i in bucket.split()] for bucket in buckets]
    return found


def test_buckets_are_those_of_distributed_data_parallel():
    sizes = GradientSize.of(build_model("vgg11", 10).parameters())
    for bucket_mb, (real, members) in run_ranks(2, torchs_buckets)[0].items():
        order = list(chain.from_iterable(members))  # backward's order; ours differs only in biases
        shares = assign_buckets([sizes[i] for i in order], bucket_mb)
        assert [[order[i] for i in share] for share in shares] == members
        ours = [int(size) for size, _ in bucket_sizes(sizes, bucket_mb)]
        assert ours == pytest.approx(real, abs=2 * 2048)
        assert BUCKETS[bucket_mb] in (None, [round(size / 1e6, 1) for size in real])
    assert [ready for _, ready in bucket_sizes(sizes, 25)] == [28_350_504, 36_924_456]


def test_a_bucket_closes_once_its_limit_is_reached():
    assert assign_buckets([], None) == []
    assert assign_buckets([MIB - 1, 1, 5, 25 * MIB, 7], None) == [[0, 1], [2, 3], [4]]
    assert assign_buckets([MIB, MIB, MIB], 2) == [[0, 1], [2]]
    two_types = [GradientSize((3,), 4), GradientSize((3,), 8), GradientSize((5,), 4)]
    assert assign_buckets(two_types, 1) == [[0, 2], [1]]


def test_a_gradients_size_is_a_number_that_remembers_its_shape():
    size = pickle.loads(pickle.dumps(GradientSize((3, 5), 8)))
    assert (size, size.shape, size.itemsize) == (120, (3, 5), 8)
    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(False)
    assert GradientSize.of(frozen.parameters()) == [24]


@pytest.mark.parametrize("ranks", range(1, 18))
def test_every_rank_but_the_root_is_one_ranks_child(ranks):
    assert sum(tree_children(rank, ranks) for rank in range(ranks)) == ranks - 1
    for name in ("tree", "ring", "halving_doubling"):
        plan = build_message_plan_from(name, {})
        total = sum(plan.bytes_sent([GradientSize((11,))], rank, ranks) for rank in range(ranks))
        assert total == 2 * 44 * (ranks - 1), name
