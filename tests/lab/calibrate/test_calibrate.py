"""Fits to data with known parameters, and complete calibrations of this machine."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest

from common.errors import UserError
from common.sync.message_cost import KINDS, GradientSize
from common.sync.plans.batchnorm import BatchNormLayer
from lab.calibrate import calibration, rank_measurements
from lab.calibrate.fits import fit_calibration
from lab.calibrate.measurements import (
    CpuSeconds,
    GroupMeasurements,
    MemoryRow,
    MessageRound,
    MessageRow,
    OverlapTimes,
    RankMeasurements,
    Sharing,
    StepTimes,
)
from lab.calibrate.rank_measurements import Measures
from lab.cli import main
from lab.fitting import fit
from lab.predict.calibration_file import describe, load_calibration, reference_path
from lab.predict.event_model import loads
from tests.helpers import (
    ROOT,
    Started,
    free_port,
    run_ranks,
    start_lab,
    user_environment,
    wait_until,
)

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 40_000_000)
TINY = Measures(
    "vgg11",
    ((1_000, 3), (100_000, 2), (4_000_000, 1)),
    rounds=1,
    message_turns=2,
    samples=(4, 8, 12),
    steps=1,
)


def rounds_of(rank, size):
    """Return what a rank measures in each round, by the progress that it shows."""
    rounds = []

    @contextmanager
    def progress(*_, total, **__):
        yield lambda done: rounds.append([done / total])

    def noted(owner, name):
        inner = getattr(owner, name)

        def call(*arguments, **options):
            if rounds:
                rounds[-1].append(name)
            return inner(*arguments, **options)

        return pytest.MonkeyPatch().setattr(owner, name, call)

    pytest.MonkeyPatch().setattr(rank_measurements, "show_progress", progress)
    noted(rank_measurements.MessageTimer, "time")
    noted(rank_measurements.Trainer, "time_steps")
    measures = replace(TINY, rounds=3, message_turns=1, sizes=TINY.sizes[:1])
    rank_measurements.measure_rank(rank, size, measures=measures, ranks_here=1)
    return rounds


@pytest.mark.slow
def test_all_rounds_of_the_progress_measure_the_same():
    """So the rest takes as long as what is done, in proportion."""
    expected = [[done / 3, "time", "time_steps"] for done in range(3)]
    assert run_ranks(2, rounds_of, 2) == [expected, expected]


def noisy(seconds, generator, share=0.03):
    return [one * (1 + share * generator.standard_normal()) for one in seconds]


def test_a_fit_finds_what_made_the_data():
    inside = np.zeros(2)
    generator = np.random.default_rng(0)
    truth = np.array([2e-4, 1.1e-9])
    for _ in range(200):
        measured = noisy([truth[0] + truth[1] * nbytes for nbytes in SIZES], generator)
        found = fit([[1.0] * len(SIZES), SIZES], measured, varied=SIZES)
        assert found.values == pytest.approx(truth, rel=0.2)
        assert found.worst_relative_error < 0.15
        lows, highs = zip(*found.intervals, strict=True)
        inside += (np.array(lows) <= truth) & (truth <= np.array(highs))
    assert all(inside >= 0.9 * 200)  # of the 95 % intervals


def test_a_fit_stays_at_or_above_zero_and_knows_what_is_known():
    falling = fit([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0], varied=[1, 2, 3])
    assert min(falling.values) >= 0
    assert falling.intervals[1][0] == 0
    known = fit([[1.0, 2.0, 3.0]], [12.0, 14.0, 16.0], varied=[1, 2, 3], known=[10.0, 10.0, 10.0])
    assert known.values == pytest.approx([2.0])
    assert known.points[0] == pytest.approx((1.0, 12.0, 12.0))


def measured_by(size, *, alpha, beta, gamma, generator):
    """Return what ``measure_rank`` would return on a machine with these parameters.

    The machine has ``size`` ranks and as many cores. Another process disturbs half of the turns.
    """

    def cpu(noise, ranks=size):
        return CpuSeconds(clock=10.0, own=9.0, all=9.0 * ranks + 10.0 * noise)

    def message_rows(kind, noise):
        rows = []
        for nbytes in SIZES:
            count, link_bytes, summed = loads(kind, nbytes, size)
            seconds = alpha * count + beta * link_bytes + gamma * summed
            (seconds,) = noisy([seconds], generator)
            rows.append(MessageRow(nbytes, (seconds + 1e-4) * (1 + noise), 1e-4))
        return rows

    def turn(noise):
        in_memory = [MemoryRow(nbytes, gamma * nbytes * (1 + noise)) for nbytes in SIZES]
        return MessageRound(
            messages={kind: message_rows(kind, noise) for kind in KINDS},
            cpu=cpu(noise),
            memory={"sum": in_memory, "copy": in_memory},
        )

    def steps(samples, speed, ranks=size):
        return [
            StepTimes(
                samples=count,
                before=speed * (0.02 + 0.003 * count) * (1 + noise),
                update=speed * 0.01,
                backward=speed * (0.05 + 0.006 * count) * (1 + noise),
                cpu=cpu(noise, ranks),
            )
            for count in samples
            for noise in (0, 1, 0, 3, 2)
        ]

    def rank(speed):
        return RankMeasurements(
            turns=[turn(noise) for noise in (3, 0, 2, 0, 1, 0)],
            threads=1,
            together=steps((8, 24, 56), speed),
            ready=[1.0, 0.9, 0.3, 0.1],
            environment={"cpu": "Test CPU"},
            overlap=[
                OverlapTimes(backward=1.0, messages=0.4, both=1.2 + noise, cpu=cpu(noise))
                for noise in (0, 5, 0)
            ],
        )

    first, *others = (rank(speed) for speed in [2.0] + [2.2] * (size - 1))
    first.alone = steps((16, 48, 112), 1.0, 1)
    sizes = [GradientSize(shape) for shape in ((100,), (10,), (50, 2), (5,))]
    sharing = Sharing(cores=size, ranks_here=size)
    return GroupMeasurements([first, *others], sizes, sharing, [BatchNormLayer(10, 1)])


@pytest.mark.parametrize("size", [2, 5])
def test_a_calibration_finds_the_machine_that_made_the_data(size, tmp_path):
    generator = np.random.default_rng(size)
    found = measured_by(size, alpha=2e-4, beta=1e-9, gamma=1e-10, generator=generator)
    made = fit_calibration(found, model="vgg11", quick=True)
    for kind in KINDS:
        rate = made.network.rate(kind)
        fitted = (rate.alpha_seconds, rate.beta_seconds_per_byte)
        assert fitted == pytest.approx((2e-4, 1e-9), rel=0.15), kind
    assert made.network.gamma_seconds_per_byte == pytest.approx(1e-10)
    assert made.network.overlap_cost == pytest.approx(0.5)
    # The share counts all turns, including those that the fit leaves out.
    assert made.others_share == pytest.approx(1.1 / size, rel=0.2)
    assert made.compute.at(100).seconds == pytest.approx(0.02 + 0.3 + 0.05 + 0.6 + 0.01)
    together = made.compute.at(50, ranks_here=size)
    # The slowest rank's time counts.
    assert together.seconds == pytest.approx(2.2 * (0.02 + 0.15 + 0.05 + 0.3 + 0.01), rel=0.01)
    ready = [together.ready_seconds(n) / together.backward_seconds for n in (20, 420, 460, 860)]
    assert ready == pytest.approx([0.1, 0.3, 0.9, 1.0])
    told = "\n".join(describe(made))
    assert "Test CPU" in told
    assert all(f"{kind} " in told for kind in KINDS)
    assert ("warning" in told) == (made.others_share > 0.1)
    made.save(tmp_path / "sub" / "calibration.json")
    again = load_calibration(tmp_path / "sub" / "calibration.json")
    assert (again.network, again.compute) == (made.network, made.compute)
    assert again.batchnorm == (BatchNormLayer(10, 1),)
    assert json.dumps(again.as_json()) == json.dumps(made.as_json())
    with pytest.raises(UserError, match=r"none\.json .*No such file.* run `lab calibrate`"):
        load_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 1", "--ranks: got 1, give 2 or more"),
        ("--model vgg12", "--model: got 'vgg12', did you mean vgg19?"),
        ("-M 127.0.0.1 -N 2", "--master-ip, --num-nodes and --rank go together"),
        ("-M 127.0.0.1 -N 2 -R 2", "--rank: got 2 of --num-nodes 2; give 0 to 1"),
        ("-M 127.0.0.1 -N 1 -R 0", "--num-nodes: got 1, give 2 or more"),
        ("--device cuda", "--device cuda measures layers only"),
        ("--profile real", "'real' stands for real compute"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(words, said, capsys):
    assert main(["calibrate", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_no_measured_batch_is_one_that_is_commonly_predicted():
    predicted = {16, 32, 64, 128, 256, 512}
    for quick in (False, True):
        samples = calibration.measures_for("vgg11", quick=quick).samples
        assert len(samples) >= 3
        assert not {count // ranks for count in samples for ranks in (1, 2, 4, 8)} & predicted


ENDLESS = """
from common.training_engine import launch_distributed_training
from lab.calibrate import rank_measurements
from lab.calibrate.calibration import measures_for

def measure(rank, size):
    rank_measurements._LIMIT_SECONDS = 1 if rank == 1 else 60
    measures = measures_for("vgg11", quick=False)
    rank_measurements.measure_rank(rank, size, measures=measures, ranks_here=2)

launch_distributed_training(measure, 2, "gloo")
"""


def start_python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return Started(command, cwd=ROOT, env=user_environment())


@pytest.mark.slow
def test_a_rank_that_measures_too_long_is_ended_and_named():
    ended = start_python(ENDLESS).end()
    assert ended.status == 1
    killed = "WorkerError: rank 1 failed:\nits process was killed by SIGALRM "
    assert killed in ended.err


@pytest.mark.slow
def test_two_ranks_calibrate_this_machine(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(calibration, "measures_for", lambda *_, **_options: TINY)
    assert main(["calibrate", "--ranks", "2", "--output", str(path)]) == 0
    made = load_calibration(path)
    assert (made.ranks, made.over_loopback, sum(made.gradient_sizes)) == (2, True, 36_924_456)
    assert [profile.ranks for profile in made.compute.profiles] == [1, 2]
    assert 0 < made.network.rate("all_reduce").beta_seconds_per_byte < 1e-6
    assert (made.compute.ready_bytes[-1], made.compute.ready_shares[-1]) == (36_924_456, 1.0)
    assert {"gamma", "copy", *KINDS} <= made.fits.keys()
    assert made.batchnorm == load_calibration(reference_path()).batchnorm


NODE = """
import sys
from lab.calibrate import calibration
from lab.calibrate.rank_measurements import Measures
from lab.cli import main
calibration.measures_for = lambda *_, **_options: eval(sys.argv[1])
sys.exit(main(["calibrate", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_nodes_calibrate_together_and_rank_0_writes(tmp_path):
    flags = f"-M 127.0.0.1 --master-port {free_port()} -N 2".split()
    paths = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    nodes = [
        start_python(NODE, repr(TINY), *flags, "-R", rank, "--output", path)
        for rank, path in enumerate(paths)
    ]
    ended = [node.end(timeout_seconds=120) for node in nodes]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    made = load_calibration(paths[0])
    assert (made.ranks, made.ranks_here) == (2, 2)  # two processes on one machine
    assert list(tmp_path.iterdir()) == paths[:1]


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path):
    path = tmp_path / "calibration.json"
    parent = start_lab("calibrate", "--ranks", 2, "--output", path, cold=True)

    def children():
        return psutil.Process(parent.process.pid).children(recursive=True)

    wait_until(lambda: len(children()) == 2, "two ranks")
    ranks = children()
    time.sleep(5)  # by now the ranks measure
    os.killpg(parent.process.pid, signal.SIGINT)  # Ctrl-C sends SIGINT to the whole process group
    assert parent.end().status != 0
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert not path.exists()
