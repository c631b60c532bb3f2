"""What becomes of an import, by what its node tells; and which node is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exaserve_ops.serving.domain.model_import import (
    FAILED,
    FETCHING,
    KEPT_FAILED_SECONDS,
    MODEL_IMPORT,
    WAITING,
    ImportFacts,
    ImportPlace,
    choose_node,
    next_step,
)
from exaserve_ops.weights.domain.held import ImportSight

FACTS = ImportFacts(
    status=WAITING,
    attempt=1,
    in_status_seconds=1.0,
    node_in_service=True,
    node_alive=True,
    node_told=True,
    sight=None,
)


def seen(state: str, **changes: object) -> ImportSight:
    return replace(ImportSight("i", state, files=3, files_done=1), **changes)  # type: ignore[arg-type]  # fields of a test


@pytest.mark.parametrize(
    ("facts", "event", "reason"),
    [
        (FACTS, "", "older version"),
        (replace(FACTS, node_told=False), "", "being told"),
        (replace(FACTS, sight=seen("listing")), "import_began", "asked for its files"),
        (replace(FACTS, status=FETCHING, sight=seen("fetching")), "", "1 of 3 files"),
        (replace(FACTS, status=FETCHING, sight=seen("fetching", reason="429")), "", "429"),
        (
            replace(FACTS, status=FETCHING, sight=seen("waiting", reason="no room")),
            "import_held_up",
            "no room",
        ),
        (replace(FACTS, sight=seen("waiting", reason="no room")), "", "no room"),
        (replace(FACTS, status=FETCHING, sight=seen("found"), parts_missing=True), "", "on its way"),
        (replace(FACTS, status=FETCHING, sight=seen("failed", reason="gated")), "import_failed", "gated"),
        (replace(FACTS, attempt=2, sight=seen("failed")), "", "older version"),
        (replace(FACTS, status=FETCHING, node_alive=False), "import_held_up", "does not answer"),
        (replace(FACTS, node_in_service=False), "import_failed", "retired"),
        (replace(FACTS, status=FAILED, sight=seen("fetching")), "", ""),
        (replace(FACTS, status=FAILED, in_status_seconds=KEPT_FAILED_SECONDS), "import_cancelled", "a day"),
    ],
)
def test_each_sight_leads_where_it_should(facts: ImportFacts, event: str, reason: str) -> None:
    step = next_step(facts)
    assert step.event == event
    assert reason in step.reason
    assert not event or MODEL_IMPORT.allows(facts.status, event)


def test_the_node_with_fewest_imports_and_most_room_is_asked_and_no_unfit_one() -> None:
    places = [
        ImportPlace("a", "a", accepts=True, free_bytes=100, open_imports=1),
        ImportPlace("b", "b", accepts=True, free_bytes=50, open_imports=0),
        ImportPlace("c", "c", accepts=True, free_bytes=70, open_imports=0),
        ImportPlace("d", "d", accepts=False, free_bytes=900, open_imports=0),
    ]
    chosen = choose_node(places)
    assert chosen is not None
    assert chosen.name == "c"
    assert choose_node(places[3:]) is None
