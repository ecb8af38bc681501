"""The page of an audit: one HTML file without outside resources, which can be sent alone.

jinja2 escapes every text. The page shares its style with that of lab/report.
"""

import platform
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from common.utils.atomic_files import write_atomically
from common.utils.system import usable_cores
from lab.audit import report
from lab.audit.result import AuditResult
from lab.predict.readable import bytes_text, duration_text


def write_page(path: Path, result: AuditResult) -> None:
    """Write the page of an audit atomically."""
    content = report.as_json(result)
    findings = [
        finding | {"title": report.title(one)}
        for finding, one in zip(content["findings"], result.findings, strict=True)
    ]
    page = _template().render(
        content,
        verdict_text=report.verdict_text(result),
        counts_text=report.counts_text(result),
        faults=[one for one in findings if one["severity"] == "fault"],
        notices=[one for one in findings if one["severity"] != "fault"],
        speed=_speed_rows(content["performance"]),
        right=report.joined(content["right"]),
        unknown=report.joined(content["unknown"]),
        replay=report.replay_lines(content["replay"]),
        facts=_facts(result),
    )
    write_atomically(path, page.encode())


@cache
def _template() -> jinja2.Template:
    here = Path(__file__).parent
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([here, here.parent / "report"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.jinja")


def _speed_rows(performance: Mapping[str, Any] | None) -> list[tuple[str, str, str, str]]:
    """Return rows of the table: what, step, exposed communication, bytes that a rank sends."""
    if not performance:
        return []
    rows = [{**performance, "strategy": "measured", "step_seconds": performance["seconds"]}]
    rows += [
        one | {"strategy": f"predicted: {one['strategy']}"} for one in performance["predicted"]
    ]
    return [
        (
            one["strategy"],
            duration_text(one["step_seconds"]),
            f"{duration_text(one['exposed_seconds'])} "
            f"({100 * one['exposed_seconds'] / max(one['step_seconds'], 1e-9):.0f} %)",
            bytes_text(one["bytes_sent"]),
        )
        for one in rows
    ]


def _facts(result: AuditResult) -> list[tuple[str, str]]:
    """Return what is needed to repeat the audit, as names and values."""
    found = report.versions(result)
    return [
        ("date", time.strftime("%Y-%m-%d %H:%M:%S")),
        ("ranks", report.runs_text(result)),
        *((f"{name} of the script", value) for name, value in found.items() if value),
        ("machine", f"{platform.platform()}, {usable_cores()} cores"),
    ]
