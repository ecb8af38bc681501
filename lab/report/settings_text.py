"""Names and values of settings, environments and calibrations as text for the page."""

import re
from collections.abc import Mapping
from typing import Any

from lab.predict.readable import bandwidth_text, duration_text
from lab.report.view import ComparisonGroup, Json, rate_text

_LABELS = {
    "dataset": "data",
    "batch_size": "batch size",
    "steps": "measured steps",
    "warmup": "warm-up steps, not measured",
    "repeats": "repeats of each cell",
    "nodes": "numbers of nodes",
    "sync": "strategies",
    "rates": "link rates",
    "until_accuracy": "until accuracy",
    "alpha": "latency of a message (alpha)",
    "beta": "bandwidth (1/beta)",
    "gamma": "summing gradients (1/gamma)",
    "least time of an all_reduce": "shortest all-reduce",
}
_UNITS = {"alpha": duration_text, "beta": bandwidth_text, "gamma": bandwidth_text}


def summary(settings: Json) -> str:
    """Return the settings of the page's second line: model, data, scaling, batch, counts."""
    parts = {
        "model": "{}",
        "dataset": "on {}",
        "scaling": "{} scaling",
        "batch_size": "batch {}",
        "steps": "{} step" if settings.get("steps") == 1 else "{} steps",
        "repeats": "{} repeat" if settings.get("repeats") == 1 else "{} repeats",
    }
    known = {name: settings[name] for name in parts if settings.get(name) is not None}
    return ", ".join(parts[name].format(value) for name, value in known.items())


def pairs(content: Json) -> list[tuple[str, str]]:
    """Return names and values as text; the page shows the command elsewhere."""
    return [
        (_LABELS.get(name, name.replace("_", " ")), _value(name, value))
        for name, value in content.items()
        if name != "command"
    ]


def block_settings(block: ComparisonGroup, results: Json) -> list[tuple[str, str]]:
    """Return the block's own settings, rate, batch sizes, seeds and folders."""
    repeats = [repeat for row in block.rows for repeat in row.repeats]
    own = {
        **results.get("groups", {}).get(str(block.group), {}),
        "link rate": rate_text(block.rate),
        "global batch size": sorted({row.batch_size for row in block.rows if row.batch_size}),
        "seeds": sorted({repeat["seed"] for repeat in repeats}),
    }
    if results["kind"] == "report":
        own["runs"] = [repeat["folder"] for repeat in repeats]
    return pairs(own)


def _value(name: str, value: Any) -> str:
    """Return a setting as a person writes it."""
    if name in _UNITS and isinstance(value, float):
        return _UNITS[name](value)
    if name == "rates" and value and isinstance(value, list):
        return ", ".join(map(rate_text, value))
    if value in (None, [], "", [None]):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "; ".join(
            f"{key.replace('_', ' ')} {_value(key, each)}" for key, each in value.items()
        )
    if isinstance(value, list):
        return ", ".join(_value("", entry) for entry in value)
    return re.sub(r"(\d{4}-\d\d-\d\d)T(?=\d\d:)", r"\1 ", str(value))
