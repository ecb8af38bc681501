"""Priors: their ranges and their draws."""

import numpy as np
import pytest

from lab.predict.priors import (
    DRAWS,
    Beliefs,
    Prior,
    load_priors,
    normal_draws,
)

NINTH = 1.2815515655446004  # z of the 90 % quantile
PRIOR = Prior("any.value", 2.0, 4.0, 32.0, "", "")


def test_low_typical_and_high_are_the_10_50_and_90_percent_quantiles():
    assert PRIOR.at(np.array([-NINTH, 0.0, NINTH])) == pytest.approx([2, 4, 32])
    assert PRIOR.at(NINTH / 3) == pytest.approx(8)
    assert PRIOR.at(-2 * NINTH) == pytest.approx(1)


def test_draws_are_a_latin_hypercube_and_always_the_same():
    draws = normal_draws(3)
    assert draws.shape == (3, DRAWS)
    for row in draws:
        assert sorted(row) == sorted(draws[0])
        assert np.quantile(row, [0.1, 0.5, 0.9]) == pytest.approx([-NINTH, 0, NINTH], abs=0.02)
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.2
    normal_draws.cache_clear()
    assert (normal_draws(3) == draws).all()


def test_drawn_values_have_the_quantiles_of_their_priors():
    beliefs = Beliefs.of(load_priors())
    values = beliefs.drawn("nccl", "tcp-vm")
    of_name = {prior.name: prior for prior in beliefs.priors}
    for drawn, name, unit in [
        (values.fixed_share, "any.fixed_share", 1),
        (values.straggler, "nccl.straggler", 1),
        (values.most_bits, "nccl-tcp-vm.most_gbit", 1e9),
        (values.message_seconds, "nccl-tcp.message_us", 1e-6),
    ]:
        prior = of_name[name]
        expected = [unit * value for value in (prior.low, prior.typical, prior.high)]
        assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(expected, rel=0.05)


def test_every_prior_has_an_ordered_range_a_meaning_and_a_source():
    for prior in load_priors():
        assert 0 < prior.low <= prior.typical <= prior.high <= prior.most
        assert prior.meaning
        assert prior.source
