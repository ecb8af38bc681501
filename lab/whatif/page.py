"""Write the page of ``lab whatif``: one file with its data, its scripts and its style.

``write_page`` gathers the data, ``render`` puts it into the template. The page can neither load nor
run anything else: its Content-Security-Policy names the hashes of its own scripts and of its style.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.say import bytes_text
from common.utils.atomic_files import write_atomically
from lab.html_page import content_policy, page_template
from lab.predict.calibration_file import calibration_path, find_calibration
from lab.whatif.data import page_data
from lab.whatif.measured import published_sets
from lab.whatif.own_steps import OwnSteps, shipped_sets, with_own_ids
from lab.whatif.questions import load_questions

_HERE = Path(__file__).parent
# Each script uses those before it.
_SCRIPTS = [
    "plans",
    "engine",
    "timeline",
    "state",
    "words",
    "pictures",
    "measured",
    "questions",
    "page",
]
_STYLES = ("style", "pictures", "measured")
_REFERENCE = Path("lab/predict/reference_calibration.json")  # as typed in the project's folder


def write_page(path: Path, *, calibration_file: Path | None, own: OwnSteps) -> int:
    """Write the page and return its size in bytes.

    calibration_file : None: this machine's own, or else the one that comes with the project.
    own : the reader's measured steps. The page begins with the first set of them.

    Raises UserError if a file cannot be read or written.
    """
    calibration, is_reference = find_calibration(calibration_file)
    # A link names a set by its id, so the reader's sets get other ids where one is taken.
    others = [*shipped_sets(), *published_sets()]
    named = with_own_ids([*others, *own.sets])
    sets = [*named[len(others) :], *named[: len(others)]]
    data = page_data(
        calibration, is_reference=is_reference, measured=sets, questions=load_questions()
    )
    data["begin"] = sets[0].id if own.sets else None
    data["problem"] = " ".join(own.problems) or None
    default = _REFERENCE if is_reference else calibration_path()
    data["calibration"]["path"] = str(calibration_file or default)
    content = render(data).encode()
    write_atomically(path, content)
    return len(content)


def render(data: Mapping[str, Any]) -> str:
    """Return the page. jinja2 escapes every text; scripts, style and data stay as they are."""
    style = "".join(_file(f"{name}.css") for name in _STYLES)
    scripts = [_file(f"{name}.js") for name in _SCRIPTS]
    return page_template(_HERE / "page.html.jinja").render(
        data=data,
        policy=content_policy(scripts, [style]),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        json=Markup(_json(data)),
        transports=[*data["transports"].items()],
        models=[*map(_model_choice, data["models"]), ("own", "your own")],
        strategies=[*map(_strategy_choice, data["strategies"])],
    )


def _model_choice(model: Mapping[str, Any]) -> tuple[str, str]:
    """Return a model's name, and the text that offers it: with the bytes of its gradients."""
    nbytes = 0
    for count, shape, itemsize in model["gradients"]:
        nbytes += count * math.prod(shape) * itemsize
    return model["name"], f"{model['name']}, {bytes_text(nbytes)}"


def _strategy_choice(strategy: Mapping[str, Any]) -> tuple[str, str]:
    """Return a strategy's name, and the text that offers it: with its label if that says more."""
    name, label = strategy["name"], strategy["label"]
    if label == name.replace("_", " "):
        return name, name
    return name, f"{name}: {label}"


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """Return the data so that no text in it ends the block or begins a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c")
