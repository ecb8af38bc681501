"""A strategy's marker in a page is the one of the figures."""

import re

from common.sync import STRATEGIES
from lab.strategy_style import marker, marker_outline


def corners(outline):
    """Return the points of a path, as x and y downward."""
    pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", outline)
    return [(float(x), float(y)) for x, y in pairs]


def test_outlines_differ_as_markers_do():
    outlines = {name: marker_outline(name) for name in STRATEGIES}
    markers = {name: marker(name) for name in STRATEGIES}
    assert len(set(outlines.values())) == len(set(markers.values()))
    for name, outline in outlines.items():
        assert re.fullmatch(r"M[MLQC\d. -]+Z", outline), name
        assert 0.4 <= max(abs(value) for point in corners(outline) for value in point) <= 0.8, name


def test_a_triangle_points_as_in_a_figure():
    """In SVG y grows downward."""
    assert marker("gather_scatter_flat") == "^"
    assert corners(marker_outline("gather_scatter_flat")) == [(0, -0.5), (-0.5, 0.5), (0.5, 0.5)]


def test_an_unknown_strategy_has_a_circle():
    points = corners(marker_outline("best_ever"))
    assert max(x for x, _ in points) == max(y for _, y in points) == 0.5
    assert "C" in marker_outline("best_ever")
