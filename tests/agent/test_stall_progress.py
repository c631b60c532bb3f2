"""Progress, not ping: what counts as standing still, and what is done about it. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.node import make_spec
from workers.agent.facts import AttemptFacts, Kill, Policy, Probe, ReplicaFacts, Terminate
from workers.agent.probing import DENIALS_TO_BE_DEAD, Answer, Outcome, ProbeState, advance
from workers.agent.progress import LONGEST_GAP_SECONDS, Progress, look
from workers.agent.scraper import _told
from workers.agent.supervisor import launch_digest, plan
from workers.engines.base import EngineSample
from workers.protocol.observed import ObservedState

POLICY = Policy()


def sample(running: int | None, tokens: float | None = 0.0, finished: float | None = 0.0) -> EngineSample:
    return EngineSample(
        requests_running=running, generation_tokens=tokens, prompt_tokens=0.0, requests_finished=finished
    )


def looks(*samples: EngineSample | None, every: float = 1.0, answered: bool = True) -> Progress:
    progress = Progress()
    for index, seen in enumerate(samples):
        progress = look(progress, now=100 + index * every, answered=answered, sample=seen)
    return progress


# -- what counts as standing still ------------------------------------------------------------------
def test_running_requests_without_a_token_stand_still() -> None:
    progress = looks(*[sample(2, 50.0)] * 61)
    assert progress.still_seconds == 60
    assert progress.still_text == "2 requests run and no token came"


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_idle_engine_never_stands_still(tokens: list[float]) -> None:
    assert looks(*[sample(0, value) for value in tokens]).still_seconds == 0


@given(st.lists(st.booleans(), min_size=2, max_size=80))
def test_still_time_is_the_time_since_any_counter_moved(moves: list[bool]) -> None:
    tokens, samples, since = 1.0, [], 0
    for index, moved in enumerate(moves):
        tokens += moved
        since = 0 if moved or index == 0 else since + 1
        samples.append(sample(3, tokens))
    assert looks(*samples).still_seconds == since


def test_finished_requests_or_prompt_tokens_are_progress_too() -> None:
    assert looks(sample(2, 5.0, 1.0), sample(2, 5.0, 2.0)).still_seconds == 0
    long_prefill = replace(sample(2, 5.0), prompt_tokens=900.0)
    assert looks(sample(2, 5.0), long_prefill).still_seconds == 0


def test_engine_that_counts_nothing_is_not_judged_by_its_counters() -> None:
    blind = EngineSample(requests_running=2)
    assert looks(*[blind] * 100).still_seconds == 0
    assert looks(*[sample(None, 5.0)] * 100).still_seconds == 0


def test_what_ran_when_answers_ceased_is_taken_to_run_still() -> None:
    progress = looks(sample(1, 5.0))
    for second in range(1, 31):
        progress = look(progress, now=100.0 + second, answered=False, sample=None)
    assert progress.still_seconds == 30
    assert progress.still_text == "1 request runs and no token came"


def test_idle_engine_that_answers_nothing_any_more_stands_still_for_want_of_answers() -> None:
    progress = looks(sample(0, 5.0))
    for second in range(1, 31):
        progress = look(progress, now=100.0 + second, answered=False, sample=None)
    assert progress.still_seconds == 30
    assert progress.still_text == "neither health nor metrics answered"


def test_observer_that_was_away_has_seen_nothing() -> None:
    progress = looks(sample(2, 5.0))
    later = look(progress, now=100 + LONGEST_GAP_SECONDS + 100, answered=True, sample=sample(2, 5.0))
    assert later.still_seconds == 0


# -- probes -------------------------------------------------------------------------------------------
def probed(*outcomes: Outcome) -> ProbeState:
    state = ProbeState()
    for second, outcome in enumerate(outcomes):
        state = advance(state, outcome, now=float(second), window_seconds=10)
    return state


def test_busy_engine_whose_tokens_flow_is_never_still_however_late_its_health() -> None:
    late = [Outcome(Answer.TIMEOUT, sample=sample(8, 100.0 + i)) for i in range(600)]
    state = probed(Outcome(Answer.READY, sample=sample(8, 99.0)), *late)
    assert (state.probe, state.note) == (Probe.READY, "busy: health answered late")
    assert state.progress.still_seconds == 0


def test_health_that_answers_hides_no_frozen_counter() -> None:
    state = probed(*[Outcome(Answer.READY, sample=sample(2, 7.0))] * 70)
    assert state.probe is Probe.READY
    assert state.progress.still_seconds == 69


def test_closed_port_of_a_living_process_is_dead_after_three() -> None:
    ready, closed = Outcome(Answer.READY, sample=sample(0)), Outcome(Answer.CLOSED)
    assert probed(ready, closed, closed).probe is Probe.READY
    assert probed(ready, closed, closed, closed).probe is Probe.DEAD
    assert probed(ready, closed, closed, closed, ready).probe is Probe.READY


def test_engine_that_denies_to_be_ready_may_recover_for_a_while() -> None:
    ready, denied = Outcome(Answer.READY, sample=sample(0)), Outcome(Answer.NOT_READY, "failed")
    assert probed(ready, *[denied] * 3).probe is Probe.UNREACHABLE
    assert probed(ready, *[denied] * DENIALS_TO_BE_DEAD).probe is Probe.DEAD


def test_nothing_is_looked_at_before_the_first_success() -> None:
    state = probed(*[Outcome(Answer.TIMEOUT)] * 900)
    assert state.progress == Progress()
    assert state.probe is Probe.LOADING


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b'{"status": "loading", "progress": 0.47}', "loading, 40 %"),
        (b'{"status": "loading", "progress": 1}', "loading, 100 %"),
        (b'{"status": "draining"}', "draining"),
        (b"", "status 503"),
        (b"[1]", "status 503"),
        (b"\xff", "status 503"),
        (b'{"status": 5}', "status 503"),
    ],
)
def test_progress_of_loading_is_told_in_steps_of_ten(page: bytes, text: str) -> None:
    assert _told(503, page) == text


# -- what is done about it ------------------------------------------------------------------------------
def facts(**changes: object) -> ReplicaFacts:
    spec = make_spec("r", stall_seconds=60.0)
    attempt = AttemptFacts(
        1, launch_digest(spec), 0.0, (10, 11), probe=Probe.READY, ready_at_seconds=5.0, has_generated=True
    )
    return ReplicaFacts("r", spec, generation=1, last_attempt=1, attempt=replace(attempt, **changes))  # type: ignore[arg-type]  # a test's


def decide(found: ReplicaFacts, now: float = 1000.0):  # type: ignore[no-untyped-def]  # noqa: ANN201 - a Decision
    (decision,) = plan([found], wish_known=True, now=now, policy=POLICY)
    return decision


def test_stalled_attempt_is_killed_without_grace_and_counts_as_a_crash() -> None:
    decision = decide(facts(still_seconds=60.0, still_text="2 requests run and no token came"))
    assert decision.stalled
    assert decision.reason == "stalled: 2 requests run and no token came for 60 s"
    end, kill = decision.actions
    assert isinstance(end, Terminate)
    assert end.blames_engine
    assert isinstance(kill, Kill)


@pytest.mark.parametrize("still", [0.0, 59.0])
def test_short_silence_is_no_stall(still: float) -> None:
    assert decide(facts(still_seconds=still)).state is ObservedState.READY


def test_first_token_of_an_attempt_may_take_longer() -> None:
    assert decide(facts(still_seconds=110.0, has_generated=False)).state is ObservedState.READY
    assert decide(facts(still_seconds=181.0, has_generated=False)).stalled


def test_stall_limit_of_nothing_means_never() -> None:
    found = facts(still_seconds=1e6)
    assert found.spec is not None
    spec = make_spec("r", stall_seconds=0.0)
    assert decide(replace(found, spec=spec)).state is ObservedState.READY


def test_engine_that_never_was_ready_is_not_judged_by_progress() -> None:
    found = facts(still_seconds=1e6, ready_at_seconds=None, probe=Probe.LOADING)
    assert decide(found, now=100.0).state is ObservedState.LOADING


def test_dead_engine_in_a_living_process_is_restarted() -> None:
    decision = decide(facts(probe=Probe.DEAD, probe_reason="health: connection refused, 3 times in a row"))
    (end,) = decision.actions
    assert isinstance(end, Terminate)
    assert end.blames_engine
    assert decision.reason.startswith("dead: health: connection refused")


def test_end_of_a_stalled_attempt_says_so_until_the_next_one() -> None:
    killed = {"term_sent_at_seconds": 999.0, "kill_sent_at_seconds": 999.0}
    ending = facts(**killed, stop_reason="stalled: x", stalled=True)
    assert decide(ending).stalled
    closing = decide(replace(ending, attempt=replace(ending.attempt, pids=())))  # type: ignore[type-var]  # set above
    assert closing.actions[0].stalled
    waiting = replace(
        ending,
        attempt=None,
        crashes=3,
        last_ended_at_seconds=999.5,
        last_exit_text="stalled: x",
        last_stalled=True,
    )
    decision = decide(waiting)
    assert (decision.state, decision.stalled) == (ObservedState.BACKING_OFF, True)
    assert "stalled: x" in decision.reason


def test_what_outlives_sigkill_is_named_as_holding_the_memory() -> None:
    ending = facts(term_sent_at_seconds=900.0, kill_sent_at_seconds=999.0)
    assert decide(ending).held_by_pids == (10, 11)
    assert decide(facts(term_sent_at_seconds=995.0, kill_sent_at_seconds=999.0)).held_by_pids == ()
