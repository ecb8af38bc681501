"""Measure how long the page of ``lab whatif`` takes to draw a change, in Chromium.

    python benchmarks/whatif.py

200 random moves of its controls, from each preset in turn: sliders, numbers, choices and boxes. A
move's time goes from the control's event until all pictures and tables are drawn and laid out: the
page's handler, what it leaves to the next frame, and a forced layout. Waiting for the screen's next
frame and painting are not in it. The last line has the processor time of the same moves, with the
browser's own work for them, which a busy machine does not change much. Also printed: the file's
size, and the same of as many moves where all strategies of bert_base are drawn, which has most to
compute.
"""

import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from loader import SEED, describe_machine, parse_flags, whole_number
from playwright.sync_api import CDPSession

from lab.whatif.own_steps import OwnSteps
from lab.whatif.page import write_page
from tests.helpers.browser import chromium

PROCESSOR = "processor"
CONTROLS = """[...document.querySelectorAll("#controls input, #controls select")]
  .filter((control) => control.id && !control.disabled && control.checkVisibility())
  .map((control) => ({
    id: control.id, kind: control.type, value: control.value,
    low: Number(control.min), high: Number(control.max),
    values: [...(control.options || [])].filter((o) => !o.disabled).map((o) => o.value),
  }))"""
MOVE = """async ({ id, value }) => {
  const control = document.getElementById(id);
  if (value === null) control.checked = !control.checked;
  else control.value = value;
  let frame = 0;
  requestAnimationFrame(() => { frame = performance.now(); });
  const begin = performance.now();
  control.dispatchEvent(new Event("input", { bubbles: true }));
  control.dispatchEvent(new Event("change", { bubbles: true }));
  const handled = performance.now() - begin;
  return new Promise((done) => {
    requestAnimationFrame(() => {
      document.querySelectorAll("svg, table").forEach((drawn) => drawn.getBoundingClientRect());
      done(handled + performance.now() - frame);
    });
  });
}"""


HEAVY = """() => {
  const names = Page.data().strategies.map((strategy) => strategy.name);
  const bert = { model: "bert_base", step_ms: 128, batch: 16, batch_size: 256 };
  Page.show({ ...Page.data().presets[0].state, ...bert, strategies: names });
}"""


def random_move(control: dict[str, Any], numbers: random.Random) -> dict[str, Any]:
    """Return a control's id and a new value; None turns a box on or off."""
    value: Any = None
    if control["kind"] == "range":
        value = numbers.uniform(control["low"], control["high"])
    elif control["kind"] == "number":
        value = round(float(control["value"] or 10) * numbers.choice((0.5, 2, 3))) or 1
    elif control["values"]:
        value = numbers.choice(control["values"])
    return {"id": control["id"], "value": value}


def measure(path: Path, moves: int, *, heavy: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each move by the kind of its control, and of the processor.

    heavy : draw all strategies of bert_base instead of the presets.
    """
    numbers = random.Random(SEED)
    found = defaultdict(list)
    with chromium() as browser, browser.page(path) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        presets = page.locator("button[data-preset]")
        for move in range(moves):
            if move % 10 == 0 and heavy:
                page.evaluate(HEAVY)
            elif move % 10 == 0:
                presets.nth(move // 10 % presets.count()).click()
            control = numbers.choice(page.evaluate(CONTROLS))
            before = processor_milliseconds(session)
            milliseconds = page.evaluate(MOVE, random_move(control, numbers))
            found[control["kind"]].append(milliseconds)
            found[PROCESSOR].append(processor_milliseconds(session) - before)
    return found


def processor_milliseconds(session: CDPSession) -> float:
    """Return the processor time of the page's thread so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return 1e3 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def row(name: str, values: list[float]) -> str:
    """Return a line of the table: number, median, 95th percentile and most."""
    most = max(values)
    high = most
    if len(values) > 1:
        high = statistics.quantiles(values, n=20, method="inclusive")[-1]
    numbers = [f"{value:>9.1f}" for value in (statistics.median(values), high, most)]
    return f"{name:<12}{len(values):>6}{''.join(numbers)}"


def main() -> None:
    """Measure and print."""
    flags = {
        "--moves": {"type": whole_number, "default": 200, "help": "of controls (default: 200)"}
    }
    arguments = parse_flags(__doc__, flags)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whatif.html"
        size = write_page(path, calibration_file=None, own=OwnSteps())
        found = measure(path, arguments.moves, heavy=False)
        heavy = measure(path, arguments.moves, heavy=True)
    print(f"\nfile: {size / 1e3:.0f} kB")
    print_table("presets", found)
    print_table("all strategies of bert_base", heavy)


def print_table(heading: str, found: dict[str, list[float]]) -> None:
    """Print what ``measure`` returned."""
    print(f"\n{heading}")
    print(f"{'ms a move':<12}{'moves':>6}{'median':>9}{'95 %':>9}{'most':>9}")
    used = found.pop(PROCESSOR)
    for kind, values in sorted(found.items()):
        print(row(kind, values))
    print(row("all", [value for values in found.values() for value in values]))
    print(row(PROCESSOR, used))


if __name__ == "__main__":
    main()
