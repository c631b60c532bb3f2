"""Threads that start together, each with its own database connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connection


def race(*runners: Callable[[], Any], expect: Sequence[type[Exception]] = ()) -> list[Any]:
    """Run all at once; returns results and expected exceptions, in the order of the runners."""
    start = threading.Barrier(len(runners))
    results: list[Any] = [None] * len(runners)

    def run(index: int, runner: Callable[[], Any]) -> None:
        try:
            start.wait(timeout=10)
            results[index] = runner()
        except tuple(expect) as error:
            results[index] = error
        except Exception as error:  # noqa: BLE001 - handed to the test below
            results[index] = AssertionError(f"unexpected {error!r}")
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for result in results:
        if isinstance(result, AssertionError):
            raise result
    return results
