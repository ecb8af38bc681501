"""Save figures, and put them into the page.

The page has its own colours in place of ``INK`` and ``PAPER``, so that figures follow light and
dark mode.
"""

import io
import re
from pathlib import Path

from matplotlib.figure import Figure

from common.utils.atomic_files import write_atomically
from lab.plot_style import INK, PAPER, plt


def save(figure: Figure, path: Path) -> str:
    """Write ``path``.png and ``path``.svg, and return the SVG for an HTML page."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(path.with_name(path.name + ".png"), picture.getbuffer())
    figure.set_layout_engine("none")  # savefig has laid it out: keep that layout
    text = svg(figure)
    write_atomically(path.with_name(path.name + ".svg"), text.encode())
    return inline(text, path.name)


def svg(figure: Figure) -> str:
    """Return the figure as SVG, without metadata, and close it."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    plt.close(figure)
    return buffer.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def inline(text: str, name: str) -> str:
    """Return an SVG file as a part of a page: ids that begin with ``name``, the page's colours.

    Screen readers skip the SVG: the element around it carries the description.
    """
    drawing = text[text.index("<svg ") :]  # without the prolog of a file
    drawing = drawing.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    drawing = drawing.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", drawing)
