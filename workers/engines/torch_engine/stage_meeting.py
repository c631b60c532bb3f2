"""How loaded stages come to compute together: they agree on blocks, then gloo connects them."""

from __future__ import annotations

import msgspec

from workers.engines.torch_engine.settings import StageSettings
from workers.engines.torch_engine.stage_company import Company
from workers.engines.torch_engine.stage_facts import (
    Agreement,
    StageFacts,
    agree,
    read_agreement,
    read_facts,
)
from workers.engines.torch_engine.stage_group import BoardStore, StageGroup

_AGREEMENT = "agreement"
_READY = "ready"


def settle_blocks(company: Company, settings: StageSettings, own: StageFacts) -> Agreement:
    """Tell what was loaded, wait for what all have. Raises `StageLostError` if they do not fit."""
    seconds = settings.join_seconds
    if settings.number == 0:
        company.wait_for_all(seconds=seconds)
        others = [
            read_facts(company.get(f"facts/{number}", seconds=seconds)) for number in range(1, settings.count)
        ]
        company.put(_AGREEMENT, msgspec.msgpack.encode(agree((own, *others))))
    else:
        company.put(f"facts/{settings.number}", msgspec.msgpack.encode(own))
    return read_agreement(company.get(_AGREEMENT, seconds=seconds))


def connect_group(company: Company, settings: StageSettings) -> StageGroup:
    """Connect to the other stages, once each has its memory. Raises `StageGroupError`, `StageLostError`."""
    company.put(f"{_READY}/{settings.number}", b"")
    for number in range(settings.count):
        company.get(f"{_READY}/{number}", seconds=settings.join_seconds)
    store = BoardStore(company.put, lambda key: company.get(key, seconds=settings.join_seconds))
    return StageGroup(store, settings.number, settings.count, host=settings.host, key=settings.key)
