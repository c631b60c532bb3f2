"""Every event that can be recorded has words that people say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import exaserve_ops
from exaserve_ops.dashboard.happenings import actor_words, has_words, words_of
from exaserve_ops.dashboard.wording import cut_middle
from exaserve_ops.health.domain.incident import INCIDENT
from exaserve_ops.inventory.domain.drain import NODE_DRAIN
from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.lifecycle import Lifecycle
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT
from exaserve_ops.serving.domain.observed import ObservedExit
from exaserve_ops.validation.domain.lifecycle import VALIDATION

KINDS = (
    *("node", "accelerator", "replica", "deployment", "installation", "ssh_host_key"),
    *("incident", "controllers", "api_key", "model", "model_import", "rollout", "validation"),
    *("staged_start", "start_rules"),
)


@pytest.mark.parametrize(
    ("kind", "lifecycle"),
    [
        ("node", NODE_LIVENESS),
        ("node", NODE_DRAIN),
        ("replica", REPLICA),
        ("deployment", DEPLOYMENT),
        ("installation", INSTALLATION),
        ("incident", INCIDENT),
        ("rollout", ROLLOUT),
        ("model_import", MODEL_IMPORT),
        ("validation", VALIDATION),
    ],
    ids=lambda value: value.name if isinstance(value, Lifecycle) else "",
)
def test_every_event_of_a_lifecycle_has_words(kind: str, lifecycle: Lifecycle) -> None:
    events = {event for _, event in lifecycle.transitions}
    assert events
    assert {event for event in events if not has_words(kind, event)} == set()
    assert not [event for event in events if "_" in words_of(kind, event)]


def test_every_event_of_a_wave_has_words_of_its_rollout() -> None:
    events = {f"wave_{event}" for _, event in WAVE.transitions}
    assert {event for event in events if not has_words("rollout", event)} == set()


def test_every_event_that_the_code_records_by_name_has_words() -> None:
    named = _recorded_names(Path(exaserve_ops.__file__).parent)
    assert {"exited", "promoted", "quarantined"} <= named
    assert {event for event in named if not any(has_words(kind, event) for kind in KINDS)} == set()


def _recorded_names(root: Path) -> set[str]:
    """Second arguments of `record_event` and `Happening` that are written out."""
    found = set()
    for path in root.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {"record_event", "Happening"}:
                event = call.args[1] if len(call.args) > 1 else None
                if isinstance(event, ast.Constant):
                    found.add(event.value)
    return found


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (ObservedExit(2, None, 9, 3.1, ()), "exited: killed by signal 9"),
        (ObservedExit(1, 1, None, 0.2, ()), "exited: code 1"),
        (ObservedExit(1, None, None, 4.0, ()), "exited"),
    ],
)
def test_an_exit_says_how(ended: ObservedExit, words: str) -> None:
    assert words_of("replica", "exited", f"attempt {ended.attempt} {ended.sentence()}") == words


def test_an_event_of_a_later_version_is_spelled_out() -> None:
    assert words_of("replica", "seen_dancing") == "seen dancing"
    assert words_of("exited", "exited", "who knows") == "exited"


def test_actors_read_as_people_say_them() -> None:
    assert actor_words("agent:node-1") == "agent on node-1"
    assert actor_words("controller:health") == "health controller"
    assert actor_words("user:olga") == "olga"
    assert actor_words("somebody") == "somebody"


def test_ids_keep_both_ends_and_short_ones_stay_whole() -> None:
    assert cut_middle("13000596-258d-442d-a39e-57b2cadc2613", 16) == "13000596-2…dc2613"
    assert cut_middle("session-of-olga", 16) == "session-of-olga"


def test_blocks_that_are_taken_back_say_nothing_of_a_death() -> None:
    """Every ordinary end gives them back in this way, too."""
    assert words_of("node", "kv_reclaimed") == "took KV blocks back from a replica whose process has ended"
