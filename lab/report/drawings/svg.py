"""Save a figure as PNG and SVG, and shrink its SVG for the page.

``save`` writes the two files and returns the SVG as ``inline`` makes it for report.html: with the
page's colours in place of ``INK`` and ``PAPER``, so that figures follow light and dark mode, and
without what matplotlib repeats. ``share_styles`` then gives all figures of a page one style sheet.
Together they leave a fifth of the bytes.
"""

import io
import re
from collections import Counter
from itertools import count
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from matplotlib.figure import Figure

from lab.plot_style import INK, PAPER, plt

_LINK = "{http://www.w3.org/1999/xlink}href"
_KEPT = ("d", "x", "y", "width", "height", "transform", "patternUnits", "fill", "style")
# The page's style sheet sets these for every figure.
_SET_BY_PAGE = re.compile(rf"font-family: [^;]+; ?|(?<=; )fill: {INK}$", re.IGNORECASE)


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
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    plt.close(figure)
    return buffer.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def inline(text: str, name: str) -> str:
    """Return an SVG file as a part of a page: short, unique ids, the page's colours, any width.

    Screen readers skip the SVG: the element around it carries the description.
    """
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    ids = {old: f"{name}-{new}" for old, new in zip(sorted(used), count(), strict=False)}
    root = ElementTree.fromstring(text)
    inner = "".join(_markup(child, ids, decimals=1) for child in root)
    body = (
        f'<svg viewBox="{root.get("viewBox")}" aria-hidden="true" focusable="false">{inner}</svg>'
    )
    return body.replace(INK, "currentColor").replace(PAPER, "var(--paper)")


def _markup(element: ElementTree.Element, ids: dict[str, str], *, decimals: int) -> str:
    """Return an element without ids that nothing refers to and without groups that do nothing."""
    tag = element.tag.rpartition("}")[2]
    # A style would apply to the whole page (style.css.jinja has it). Figures need no clipping: they
    # draw nothing outside their axes.
    if tag in ("style", "clipPath"):
        return ""
    attributes = {name: element.get(name, "") for name in _KEPT if element.get(name)}
    if tag == "text":
        attributes["style"] = _SET_BY_PAGE.sub("", attributes.get("style", "")).rstrip("; ")
        if "rotate(-0 " in attributes.get("transform", ""):
            del attributes["transform"]
    if element.get("id") in ids:
        attributes["id"] = ids[element.get("id", "")]
    if target := element.get(_LINK):
        attributes["href"] = "#" + ids[target[1:]]
    if style := attributes.get("style"):
        attributes["style"] = re.sub(r"(?<=url\(#)[^)]+", lambda found: ids[found[0]], style)
    decimals = 2 if tag == "defs" else decimals  # markers and hatches are a few points wide
    for name in attributes.keys() & {"d", "x", "y", "width", "height", "transform"}:
        attributes[name] = _rounded(attributes[name], decimals)
    if "d" in attributes:
        attributes["d"] = _shorter_path(attributes["d"])
    inner = (
        escape("".join(element.itertext()))
        if tag == "text"
        else "".join(_markup(child, ids, decimals=decimals) for child in element)
    )
    if tag in ("g", "defs") and (not inner or (not attributes and tag == "g")):
        return inner
    opened = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items())
    return f"<{tag}{opened}>{inner}</{tag}>" if inner else f"<{tag}{opened}/>"


def _rounded(text: str, decimals: int) -> str:
    return re.sub(r"-?\d+\.\d+", lambda found: f"{round(float(found[0]), decimals) or 0:g}", text)


def _shorter_path(path: str) -> str:
    """Return the path with horizontal and vertical lines written as ``H`` and ``V``."""
    commands, here = [], ("", "")
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        end = tuple(numbers.split())
        same = [new == old for new, old in zip(end, here, strict=False)] if command == "L" else []
        if same == [True, True]:
            continue
        if True in same:
            commands.append(f"H{end[0]}" if same[1] else f"V{end[1]}")
        else:
            commands.append(command + " ".join(end))
        here = end[-2:] if end else here
    return "".join(commands)


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
