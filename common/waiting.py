"""Waiting for what may never answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Start ``action`` in a thread that keeps no process from ending; return what will hold its result or its error."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome
