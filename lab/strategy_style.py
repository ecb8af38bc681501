"""A strategy's colour and marker, the same in all figures and pages."""

from collections.abc import Sequence

from common.errors import UserError
from common.sync import STRATEGIES

# Every colour of a strategy (common/sync) or below has a contrast of at least 3 to a light and to a
# dark page, and one meaning: strategies have no blue, orange, green or slate, which sections of a
# step have (plot_style.py). No figure relies on colour alone.
SPARE_COLORS = ("#e619e5", "#e61942", "#a819e6", "#d2664b", "#b42db4", "#e61980")
"""For strategies that state none, in their order; for unknown ones by name."""
SPARE_MARKERS = "1234+x"

_SVG_COMMANDS = {1: "M", 2: "L", 3: "Q", 4: "C"}  # by matplotlib's codes of a path


def color(sync: str) -> str:
    """Return the colour of a strategy, which no other one of the project has.

    An unknown strategy's name picks a spare colour. Raises UserError if too few are left.
    """
    if sync not in STRATEGIES:
        return SPARE_COLORS[sum(map(ord, sync)) % len(SPARE_COLORS)]
    stated = STRATEGIES[sync].color
    if stated is not None:
        return stated
    return _spare(sync, "color", SPARE_COLORS, called="colour")


def marker(sync: str) -> str:
    """Return the marker of a strategy; one that states none has a marker of its own, too."""
    if sync not in STRATEGIES:
        return "o"
    stated = STRATEGIES[sync].marker
    if stated is not None:
        return stated
    return _spare(sync, "marker", SPARE_MARKERS, called="marker")


def marker_outline(sync: str) -> str:
    """Return a strategy's marker as an SVG path around (0, 0), about 1 wide, as figures draw it."""
    from matplotlib.markers import MarkerStyle  # slow to import, and lab --help imports this file

    style = MarkerStyle(marker(sync))
    path = style.get_path().transformed(style.get_transform())
    parts = []
    for points, code in path.iter_segments():
        if code != path.CLOSEPOLY:
            corners = (points.reshape(-1, 2) * [1, -1]).round(3) + 0.0  # no minus before a zero
            numbers = [f"{x:g} {y:g}" for x, y in corners]
            parts.append(_SVG_COMMANDS[int(code)] + " ".join(numbers))
        else:
            parts.append("Z")
    return "".join(parts)


def _spare(sync: str, field: str, spares: Sequence[str], *, called: str) -> str:
    """Return what no other strategy has, for one whose record leaves ``field`` out.

    Raises UserError if too few are left.
    """
    stated = {name: getattr(strategy, field) for name, strategy in STRATEGIES.items()}
    without = [name for name, value in stated.items() if value is None]
    left = [spare for spare in spares if spare not in stated.values()]
    number = without.index(sync)
    if number >= len(left):
        raise UserError(f"no {called} is left for {sync}: state one in its record in STRATEGIES")
    return left[number]
