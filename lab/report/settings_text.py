"""Names and values of settings, environments and calibrations as text for the page."""

import re
from collections.abc import Mapping
from typing import Any

from common.say import bandwidth_text, duration_text
from common.utils.typed_json import Facts
from lab.comparison.record import Comparison
from lab.report.view import ComparisonGroup, link_text

_LABELS = {
    "dataset": "data",
    "batch_size": "batch size",
    "steps": "measured steps",
    "warmup": "warm-up steps, not measured",
    "repeats": "repeats of each cell",
    "nodes": "numbers of ranks",
    "sync": "strategies",
    "rates": "link rates",
    "until_accuracy": "until accuracy",
    "alpha": "latency of a message (alpha)",
    "beta": "bandwidth (1/beta)",
    "gamma": "summing gradients (1/gamma)",
    "least time of an all_reduce": "shortest all-reduce",
}
_UNITS = {"alpha": duration_text, "beta": bandwidth_text, "gamma": bandwidth_text}
# The settings of the page's second line, and how each is written; {}: its value.
_SUMMARY = {
    "model": "{}",
    "dataset": "on {}",
    "scaling": "{} scaling",
    "batch_size": "batch {}",
    "steps": "{} steps",
    "repeats": "{} repeats",
}


def summary(settings: Facts) -> str:
    """Return the settings of the page's second line: model, data, scaling, batch, counts."""
    texts = []
    for name, form in _SUMMARY.items():
        value = settings.get(name)
        if value is None:
            continue
        if value == 1 and name in ("steps", "repeats"):
            form = form.removesuffix("s")
        texts.append(form.format(value))
    return ", ".join(texts)


def pairs(facts: Facts) -> list[tuple[str, str]]:
    """Return names and values as text; the page shows the command elsewhere."""
    return [
        (_LABELS.get(name, name.replace("_", " ")), _value(name, value))
        for name, value in facts.items()
        if name != "command"
    ]


def block_settings(block: ComparisonGroup, comparison: Comparison) -> list[tuple[str, str]]:
    """Return the block's own settings, rate, batch sizes, seeds and folders."""
    repeats = [repeat for row in block.rows for repeat in row.cell.repeats]
    batch_sizes = {row.cell.batch_size for row in block.rows if row.cell.batch_size}
    own = comparison.groups.get(str(block.group), {}) | {
        "link rate": link_text(block.rate),
        "global batch size": sorted(batch_sizes),
        "seeds": sorted({repeat.seed for repeat in repeats}),
    }
    if comparison.kind == "report":
        own["runs"] = [repeat.folder for repeat in repeats]
    return pairs(own)


def _value(name: str, value: Any) -> str:
    """Return a setting as a person writes it."""
    if name in _UNITS and isinstance(value, float):
        return _UNITS[name](value)
    if name == "rates" and value and isinstance(value, list):
        return ", ".join(map(link_text, value))
    if value in (None, [], "", [None]):
        return "none"
    if isinstance(value, list):
        return ", ".join(_value("", entry) for entry in value)
    if isinstance(value, Mapping):
        return "; ".join(
            f"{key.replace('_', ' ')} {_value(key, entry)}" for key, entry in value.items()
        )
    return _plain_text(value)


def _plain_text(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return re.sub(r"(\d{4}-\d\d-\d\d)T(?=\d\d:)", r"\1 ", str(value))
