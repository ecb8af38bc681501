"""The colours of figures: readable on light and dark pages, and each with one meaning."""

from dataclasses import replace
from itertools import combinations

import numpy as np

from common.sync import STRATEGIES
from lab.plot_style import SECTIONS
from lab.strategy_style import SPARE_COLORS, color, marker

PAPERS = ("#ffffff", "#14171c")  # of style.css.jinja, light and dark
# Linear RGB as people without red or green receptors see it (Machado et al. 2009).
SIGHTS = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    ),
    "protanopia": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    ),
}


def linear(color):
    values = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    low, high = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def distance(one, other, sight="normal"):
    """Return the CIELAB distance of two colours; 2 can just be seen side by side."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    labs = []
    for shown in (one, other):
        seen = np.clip(SIGHTS[sight] @ linear(shown), 0, 1)
        roots = np.cbrt(np.maximum(to_xyz @ seen / [0.9505, 1, 1.089], 0.009))
        labs.append(
            np.array([116 * roots[1], 500 * (roots[0] - roots[1]), 200 * (roots[1] - roots[2])])
        )
    return float(np.linalg.norm(labs[0] - labs[1]))


def test_every_colour_can_be_read_on_light_and_dark_pages():
    for shown in [*map(color, STRATEGIES), *SPARE_COLORS, *SECTIONS.values()]:
        assert min(contrast(shown, paper) for paper in PAPERS) >= 3, shown


def test_a_colour_has_one_meaning():
    assert len({color(name) for name in STRATEGIES}) == len(STRATEGIES)
    stated = [strategy.color for strategy in STRATEGIES.values() if strategy.color is not None]
    colors = [*stated, *SPARE_COLORS]
    assert len(set(colors)) == len(colors)
    for shown in colors:
        for section, fill in SECTIONS.items():
            assert distance(shown, fill) > 15, (shown, section)


def test_sections_differ_for_colour_blind_readers():
    shown = {name: color for name, color in SECTIONS.items() if name != "sync"}  # drawn as wire
    for sight in SIGHTS:
        for one, other in combinations(shown, 2):
            assert distance(shown[one], shown[other], sight) > 15, (sight, one, other)


def test_a_strategy_that_states_no_marker_gets_one_of_its_own(monkeypatch):
    stated = {strategy.marker for strategy in STRATEGIES.values()}
    for name in ("first", "second"):
        plain = replace(STRATEGIES["ring"], marker=None)
        monkeypatch.setitem(STRATEGIES, name, plain)
    assert marker("first") != marker("second")
    assert not {marker("first"), marker("second")} & stated
