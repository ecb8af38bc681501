"""Names and values of settings, environments and calibrations as text for the page."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lab.report.view import ComparisonGroup, bandwidth_text, duration_text, rate_text

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
_SUMMARY = {
    "model": "{}",
    "dataset": "on {}",
    "scaling": "{} scaling",
    "batch_size": "batch {}",
}


def summary(settings: Mapping[str, Any]) -> str:
    """Return the settings of the page's second line: model, data, scaling, batch, counts."""
    parts = [
        text.format(settings[name])
        for name, text in _SUMMARY.items()
        if settings.get(name) is not None
    ]
    counts = ("steps", "repeats")
    return ", ".join(
        parts + [_counted(settings[name], name) for name in counts if name in settings]
    )


def _counted(number: int, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"


def pairs(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text; the page shows the command elsewhere."""
    return [
        (_LABELS.get(name, str(name).replace("_", " ")), _value(name, value))
        for name, value in content.items()
        if name != "command"
    ]


def _value(name: str, value: Any) -> str:
    if name == "least time of an all_reduce" and isinstance(
        value, Mapping
    ):  # by link: "4 nodes, 1gbit"
        return "; ".join(f"{time} on {_link(link)}" for link, time in value.items())
    if name in _UNITS and isinstance(value, float):
        return _UNITS[name](value)
    if name == "rates" and value and isinstance(value, list):
        return ", ".join(map(rate_text, value))
    return _text(value)


def _link(text: str) -> str:
    nodes, comma, rate = text.partition(", ")
    return f"{nodes} at {rate_text(rate)}" if comma else nodes


def block_settings(block: ComparisonGroup, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the block's own settings, rate, batch sizes, seeds and folders."""
    repeats = [repeat for row in block.rows for repeat in row.cell.get("repeats") or []]
    folders = [str(repeat["folder"]) for repeat in repeats if repeat.get("folder")]
    return [
        *pairs((results.get("groups") or {}).get(str(block.group)) or {}),
        ("link rate", rate_text(block.rate)),
        ("global batch size", _distinct(row.cell.get("batch_size") for row in block.rows)),
        ("seeds", _distinct(repeat.get("seed") for repeat in repeats)),
        *([("runs", _distinct(folders))] if results.get("kind") == "report" else []),
    ]


def _distinct(values: Iterable[Any]) -> str:
    return _text(list(dict.fromkeys(values)))


def _text(value: Any) -> str:
    """Return a setting as a person writes it."""
    if value in (None, [], "", [None]):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "; ".join(
            f"{name.replace('_', ' ')} {_value(name, entry)}" for name, entry in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return re.sub(r"(\d{4}-\d\d-\d\d)T(?=\d\d:)", r"\1 ", str(value))
