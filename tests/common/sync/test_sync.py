"""Every exact strategy equals one process on the whole batch, after every step.

The harness is lab/proofs/equivalence.py; tests/lab/proofs/test_proofs.py shows that it can fail.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.errors import UserError
from lab.proofs import Case, check_equivalence, check_group
from tests.helpers import RankError, run_ranks
from tests.helpers.engines import prepared
from tests.helpers.strategies import EXACT, Switching

TYPES = {"float64": Case(), "float32": Case(dtype=torch.float32, channels_last=True)}
SIZES = [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 5, 6))]
OTHER_CASES = {
    "clipping": Case(clip_norm=0.05),
    "accumulation": Case(accumulation_steps=3),
    "even and plain": Case(
        uneven=False, tied=False, frozen=False, unused=False, momentum=0.0, weight_decay=0.0
    ),
}


def jobs(cases, names=EXACT):
    """Return what to compare, by strategy and case; fsdp wants the same layers on all ranks."""
    return {
        f"{name}-{kind}": (name, replace(case, unused=case.unused and name != "fsdp"))
        for name in names
        for kind, case in cases.items()
    }


def asked(request):
    """Return the strategies that this session tests; of a planted mistake it is one."""
    tests = [one for one in request.session.items if one.originalname == request.node.originalname]
    return tuple(dict.fromkeys(one.callspec.params["name"] for one in tests))


@functools.cache
def compared(size, names):
    """Return the result of each strategy and type, computed once for all tests."""
    return check_group(jobs(TYPES, names), size)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", SIZES)
def test_equals_one_process_after_every_step(request, size, name, kind):
    found = compared(size, asked(request))[f"{name}-{kind}"]
    assert len(found.steps) == 4
    assert found.first_wrong is None, str(found)


@pytest.mark.parametrize("kind", OTHER_CASES)
def test_other_cases_equal_one_process(kind):
    """On two ranks: some micro-batches are empty, and clipping cuts the norm to a tenth."""
    for name, found in check_group(jobs({kind: OTHER_CASES[kind]}), 2).items():
        assert found.first_wrong is None, f"{name}: {found}"


def test_none_equals_one_process():
    [found] = check_equivalence("none", sizes=[1])
    assert found.first_wrong is None, str(found)


def switches_in_second_step(rank, name):
    model = Switching()
    engine, batch = prepared(model, name), (torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))
    for model.use_extra in (False, True):
        engine.train_step([batch], global_samples=8)


@pytest.mark.parametrize("name", ["gather_scatter", "all_reduce", "all_reduce_flat", "overlapped"])
def test_other_gradients_than_in_the_first_step_are_an_error_naming_them(name):
    told = r"'extra\.weight' has a gradient in this step, but had none in the first"
    with pytest.raises(RankError, match=told):
        run_ranks(2, switches_in_second_step, name)


def different_models(rank):
    prepared(nn.Linear(4, 2 + rank), "all_reduce")


def test_different_models_are_refused_before_the_first_step():
    told = r"the ranks differ in the model's parameters\. weight: \(2, 4\).* on rank 0"
    with pytest.raises(RankError, match=told):
        run_ranks(2, different_models)


def test_a_criterion_that_is_no_mean_is_refused():
    with pytest.raises(UserError, match="reduction='sum'"):
        prepared(nn.Linear(2, 2), criterion=nn.CrossEntropyLoss(reduction="sum"))
