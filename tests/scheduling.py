"""How the suite is spread over processes: one file, one process; the fleets last, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer

ONE_AT_A_TIME = ("tests/system/", "tests/browser/")
"""Each of these starts a whole fleet; two at once on two cores would measure each other."""


class FleetsApart(LoadFileScheduling):
    """Files go to whichever process is free, but all files with fleets to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ONE_AT_A_TIME):
            return "fleets"
        return str(super()._split_scope(nodeid))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start fleets last, with or without processes."""
    items.sort(key=lambda item: item.nodeid.startswith(ONE_AT_A_TIME))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FleetsApart:
    """Take the place of `--dist loadfile`."""
    return FleetsApart(config, log)
