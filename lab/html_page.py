"""The HTML pages that the project writes: their templates, and what a browser lets them do.

jinja2 escapes every text. Should a stranger's text reach a page unescaped all the same, the
policy keeps the browser from running it.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

_SHARED = Path(__file__).with_name("report")  # has the style of most pages


def page_template(file: Path, **filters: Callable[..., object]) -> jinja2.Template:
    """Return a page's template, which may include those of lab/report, and uses ``policy()``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([file.parent, _SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    environment.globals["policy"] = content_policy
    return environment.get_template(file.name)


def content_policy(scripts: Sequence[str] = (), styles: Sequence[str] = ()) -> Markup:
    """Return the Content-Security-Policy of a page that loads nothing and runs these scripts alone.

    styles : the only ones; none: any style, as in figures, whose elements have some.
    """
    script_sources = " ".join(map(_hash, scripts)) or "'none'"
    style_sources = " ".join(map(_hash, styles)) or "'unsafe-inline'"
    directives = [
        "default-src 'none'",
        f"script-src {script_sources}",
        f"style-src {style_sources}",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return Markup("; ".join(directives))


def _hash(text: str) -> str:
    """Return what names a block in the policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
