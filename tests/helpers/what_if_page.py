"""What tests do on the page of ``lab whatif``, in a Page of playwright."""

from typing import Any

from playwright.sync_api import Page

from tests.helpers.waiting import wait_until

NUMBERS = "input[type=number][id^='c-']"
_DATA = "JSON.parse(document.getElementById('data').textContent)"
_TEXTS = """() => {
  const text = (id) => document.getElementById(id).textContent.trim();
  const tables = ["timeline", "steps", "efficiency", "strategies"].map((id) => text(`table-${id}`));
  return { limit: text("limit"), sentence: text("sentence"), tables, command: text("command") };
}"""
_NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def settle(page: Page) -> None:
    """Wait until the page has drawn what it was told."""
    page.evaluate(_NEXT_FRAME)


def wait_for(page: Page, condition: str) -> None:
    """Wait until a JavaScript expression holds.

    playwright's own wait evaluates it inside the page, which the page's policy forbids.
    """
    wait_until(lambda: page.evaluate(condition), condition)


def shown(page: Page) -> dict[str, Any]:
    """Return what the page tells: the answer, the numbers below each picture, and the command.

    Opens all tables.
    """
    open_all(page)
    return page.evaluate(_TEXTS)


def set_number(page: Page, name: str, value: Any) -> None:
    """Type a number into a field."""
    field = page.locator(f"#c-{name}")
    field.fill(str(value))
    field.dispatch_event("change")
    settle(page)


def choose_preset(page: Page, name: str) -> None:
    """Press a preset's button."""
    page.locator(f"button[data-preset='{name}']").click()
    settle(page)


def open_all(page: Page) -> None:
    """Open everything that can be unfolded, and wait until it is filled."""
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    settle(page)


def link_of(page: Page, state: dict[str, Any]) -> str:
    """Return the end of the link that opens the page in a state."""
    return page.evaluate(f"(state) => State.encode({_DATA}, state)", state)


def state_of(page: Page, link: str) -> dict[str, Any]:
    """Return the state of a link's end."""
    return page.evaluate(f"(link) => State.decode({_DATA}, link).state", link)
