"""Save a figure as PNG and SVG, and shrink its SVG for the page.

``save`` writes the two files and returns the SVG as ``inline`` makes it for report.html: with the
page's colours in place of ``INK`` and ``PAPER``, so that figures follow light and dark mode, and
without what matplotlib repeats. ``share_styles`` then gives all figures of a page one style sheet.
Together they leave less than half of the bytes.
"""

import io
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.figure import Figure

from lab.plot_style import INK, PAPER, plt

_ID = re.compile(r'(?:(?<= id=")|(?<=href="#)|(?<=url\(#))[^")]+')
_ATTRIBUTES = "id viewBox d x y width height transform patternUnits fill style"
_KEPT = {name: name for name in _ATTRIBUTES.split()} | {
    "{http://www.w3.org/1999/xlink}href": "href"
}


def save(figure: Figure, path: Path) -> str:
    """Write ``path``.png and ``path``.svg, and return the SVG for an HTML page."""
    figure.savefig(path.with_name(path.name + ".png"), dpi=150)
    figure.set_layout_engine("none")  # savefig has laid it out: keep that layout
    text = svg(figure)
    path.with_name(path.name + ".svg").write_text(text, encoding="utf-8")
    return inline(text, path.name)


def svg(figure: Figure) -> str:
    """Return the figure as SVG, without metadata, and close it."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    plt.close(figure)
    return buffer.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def inline(text: str, name: str) -> str:
    """Return an SVG file as a part of a page: short, unique ids, the page's colours, any width.

    Screen readers skip the SVG: the element around it carries the description.
    """
    used = sorted(set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text)))
    ids = {old: f"{name}-{index}" for index, old in enumerate(used)}
    # A style would apply to the whole page (style.css.jinja has it). Figures need no clipping: they
    # draw nothing outside their axes.
    text = re.sub(r"<(style|clipPath) .*?</\1>|font-family: [^;]+; ?", "", text, flags=re.S)
    text = _ID.sub(lambda found: ids.get(found[0], ""), text)
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = element.text if element.tag == "text" else None, None
        element.attrib = {
            _KEPT[key]: _shorter(value) for key, value in element.items() if key in _KEPT and value
        }
    root.attrib = {"viewBox": root.get("viewBox", ""), "aria-hidden": "true", "focusable": "false"}
    body = ElementTree.tostring(root, encoding="unicode")
    return body.replace(INK, "currentColor").replace(PAPER, "var(--paper)")


def _shorter(value: str) -> str:
    """Return an attribute without line breaks, and numbers with two decimals."""
    return re.sub(
        r"-?\d+\.\d+",
        lambda found: f"{round(float(found[0]), 2) or 0:g}",
        value.replace("  ", ""),
    )


def share_styles(page: str) -> str:
    """Replace the ``style`` attributes of a page by classes of its style sheet.

    Only figures have such attributes: the template writes none and escapes every text.
    """
    pattern = re.compile(r' style="([^"]+)"')
    styles = [style for style, _ in Counter(pattern.findall(page)).most_common()]
    names = {style: f"f{index:x}" for index, style in enumerate(styles)}
    page = pattern.sub(lambda found: f' class="{names[found[1]]}"', page)
    rules = "\n".join(f".{name} {{{style}}}" for style, name in names.items())
    return page.replace("</style>", f"{rules}\n</style>", 1)
