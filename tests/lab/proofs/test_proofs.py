"""The proof harness finds what is wrong, and says where.

``-m mutation`` plants every wrong implementation and expects a test to catch it.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from common.errors import UserError
from lab.proofs import Case, RankError, check_equivalence, check_group, ranks, run_ranks
from tests.helpers import ROOT, Started, user_environment
from tests.helpers.wrong import WRONG
from tests.helpers.wrong_strategies import (
    FirstParameterLeftOut,
    LiteralDivisor,
    Mean,
    NoInitialBroadcast,
    OwnGradient,
)

BY_NAME = {one.name: one for one in WRONG}
MAKE_TEST = "not slow and not engines and not mutation and not long"
GROUPS = {"loss weighting", "SyncBatchNorm"} | set(
    "strategy sharding BatchNorm resume clipping checkpoint accumulation seeds".split()
)


# --- The harness ---


def average(model):
    """A user's own function, correct if every rank has every gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def test_a_right_function_and_a_right_class_pass():
    for strategy, case in ((Mean(), Case()), (average, Case(unused=False))):
        for found in check_equivalence(strategy, sizes=(2, 3), case=case):
            assert found.first_wrong is None, str(found)
            assert 0 < found.greatest.error < 1e-12, (
                "rounding, not zero: two computations were compared"
            )


def test_a_difference_is_told_with_its_step_rank_and_parameter():
    def wrong_from_the_third_step(model, calls=[]):  # noqa: B006
        average(model)
        calls.append(1)
        if len(calls) == 3 and dist.get_rank() == 1:
            model.head.bias.grad += 1.0

    [found] = check_equivalence(wrong_from_the_third_step, sizes=[2], case=Case(unused=False))
    wrong = found.first_wrong
    assert wrong is not None
    assert (wrong.step, wrong.rank, wrong.parameter, wrong.equal_bits) == (3, 1, "head.bias", False)
    assert [step.error < 1e-12 for step in found.steps] == [True, True, False, False]
    assert re.match(
        r"2 ranks, step 3: head\.bias on rank 1 differs from one process by .*; the ranks hold "
        r"different weights",
        str(found),
    )
    assert not found


def test_a_difference_of_one_bit_between_the_ranks_is_wrong():
    def off_by_a_bit(model):
        average(model)
        if dist.get_rank() == 1:
            model.head.bias.grad[0] *= 1 + 1e-15

    [found] = check_equivalence(off_by_a_bit, sizes=[2], case=Case(unused=False))
    assert found.greatest.error < 1e-12
    assert re.fullmatch(
        r"2 ranks, step [1-4]: the ranks hold different weights; all are within \d\.\de-1\d of one "
        r"process, so perhaps the ranks add in different orders",
        str(found),
    )
    assert not found


def test_where_the_number_of_ranks_matters_it_is_seen():
    two, three = check_equivalence(LiteralDivisor(), sizes=(2, 3))
    assert two.first_wrong is None, "a literal 2 is right on two ranks"
    assert three.first_wrong is not None


def test_several_strategies_share_a_group():
    kinds = (Mean, OwnGradient, FirstParameterLeftOut, NoInitialBroadcast)
    found = check_group({kind.__name__: (kind(), Case()) for kind in kinds}, 3)
    assert {name for name, one in found.items() if one.first_wrong is None} == {"Mean"}
    assert found["FirstParameterLeftOut"].first_wrong.parameter == "conv.weight"


@pytest.mark.parametrize(
    ("strategy", "sizes", "words"),
    [
        (
            OwnGradient,
            [2],
            r"strategy: got OwnGradient, give .* an instance such as OwnGradient\(\)",
        ),
        ("telepathy", [2], "unknown strategy 'telepathy': choose one of"),
        ("all_reduce", [0], "sizes: got 0"),
        ("all_reduce", [], "sizes: got none, give numbers of ranks"),
    ],
)
def test_what_cannot_be_compared_is_refused(strategy, sizes, words):
    with pytest.raises(UserError, match=words):
        check_equivalence(strategy, sizes=sizes)


def test_an_error_on_a_rank_is_told_with_its_traceback():
    def fails(model):
        raise KeyError("the very reason")

    with pytest.raises(RankError, match="KeyError: 'the very reason'"):
        check_equivalence(fails, sizes=[2])


SCRIPT = """
import torch.distributed as dist
from common.sync.base import GradientSync
from lab.proofs import check_equivalence

class MyStrategy(GradientSync):
    def synchronize(self, model):
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()

for result in check_equivalence(MyStrategy(), sizes=(2, 3)):
    print(result)
"""


@pytest.mark.slow
def test_a_users_own_strategy_in_a_script_without_a_guard(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    ended = Started(
        [sys.executable, "mine.py"], cwd=tmp_path, env=user_environment(PYTHONPATH=str(ROOT))
    ).end()
    assert [line.split(" within")[0] for line in ended.out.splitlines()] == [
        f"{size} ranks: equal to one process" for size in (2, 3)
    ], ended


FROM_ANOTHER_FOLDER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lab.proofs import ranks, run_ranks

ranks.PRELOADED.append("tests.helpers.tiny_model")
print(run_ranks(1, lambda rank: "tests.helpers.tiny_model" in sys.modules))
"""


@pytest.mark.slow
def test_ranks_have_what_was_to_be_imported_wherever_the_first_is_started(tmp_path):
    command = [sys.executable, "-c", FROM_ANOTHER_FOLDER]
    ended = Started(command, cwd=tmp_path, env=user_environment()).end()
    assert ended.out == "[True]\n", ended


def test_a_rank_that_is_killed_is_told_at_once():
    def dies(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL and gave no answer"):
        run_ranks(2, dies, timeout_seconds=60)


def test_the_rank_that_failed_is_told_not_the_one_that_lost_it():
    def fails_first(rank):
        if rank == 1:
            raise KeyError("the very reason")
        dist.barrier()

    for _ in range(3):
        with pytest.raises(RankError, match=r"rank 1 of 2:\n(?s:.*)KeyError: 'the very reason'"):
            run_ranks(2, fails_first)


def test_a_rank_that_hangs_is_told_after_the_limit():
    def hangs(rank):
        if rank == 1:
            time.sleep(60)

    with pytest.raises(RankError, match=r"no answer within 1 s from rank 1 of 2"):
        run_ranks(2, hangs, timeout_seconds=1)


def test_float32_has_a_tolerance_of_its_own():
    case = Case(dtype=torch.float32)
    [found] = check_equivalence("all_reduce", sizes=[2], case=case)
    assert 1e-9 < found.greatest.error < case.tolerance == 1e-5


# --- The list of wrong implementations ---


def test_the_list_is_complete_and_its_names_are_unique():
    assert len(WRONG) >= 20
    assert len(BY_NAME) == len(WRONG)
    assert {one.group for one in WRONG} == GROUPS
    for group in GROUPS:
        assert len([one for one in WRONG if one.group == group]) >= 2, group
    for one in WRONG:
        assert one.what.rstrip().endswith("."), one.name


class _Failures:
    """A pytest plugin that keeps each failed test's message and phase."""

    def __init__(self):
        self.messages: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed
        if report.failed:
            message = getattr(
                getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr)
            )
            self.messages.append(f"[{report.when}] {message}")


def _run_check(name, answers):
    """Plant a mistake, run its check, and send back (tests passed, failure messages).

    The caller runs this in a child process, so that the mistake stays there.
    """
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False
    ranks.fork_from_this_process()
    wrong, failures = BY_NAME[name], _Failures()
    wrong.plant()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        flags = "-x -p no:cacheprovider -p no:xdist --tb=short -m".split()
        pytest.main([*flags, MAKE_TEST, wrong.check], plugins=[failures])
    # A pipe holds 64 KB, and nobody reads it before this process ends, so messages are cut.
    answers.put((failures.passed, [message[:4000] for message in failures.messages]))


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_implementation_is_caught(name):
    wrong, maker = BY_NAME[name], ranks.context()
    answers = maker.SimpleQueue()
    process = maker.Process(target=_run_check, args=(name, answers), daemon=True)
    process.start()
    process.join(timeout=200)
    if process.exitcode is None:
        process.kill()
        process.join()
    ended = f"{wrong.check}: not done in time, or ended with {process.exitcode}"
    assert process.exitcode == 0, ended
    passed, messages = answers.get()
    assert passed or messages, f"{wrong.check} is no test of make test"
    assert messages, f"{wrong.what} {wrong.check} passes all the same"
    assert messages[0].startswith("[call]"), messages
    other = f"{wrong.check} fails for another reason: {messages}"
    assert re.search(wrong.reason, messages[0], re.DOTALL), other
