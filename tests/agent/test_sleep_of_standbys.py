"""Standbys that sleep: the plan in a world with a virtual clock, and a real engine that can."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from tests.fakes.delicate_engine import DelicateAdapter
from tests.fakes.delicate_server import DelicateServerAdapter
from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec
from workers.agent.memory_gate import HostMemory
from workers.agent.supervisor import (
    AttemptFacts,
    Decision,
    ForgetCrashes,
    Policy,
    Probe,
    ReplicaFacts,
    RequestState,
    SetSleep,
    SleepFacts,
    Terminate,
    launch_digest,
    plan,
)
from workers.engines.base import EngineAdapter
from workers.engines.simulated import SimulatedAdapter
from workers.engines.vllm.entry import RequireKey
from workers.protocol.engines.sleeping import ASLEEP, AWAKE, FALLING_ASLEEP, WAKING, why_no_sleep
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelFile, ReplicaSpec, WantedState

WAIT_SECONDS = 90.0
"""Far more than it takes: a busy machine is no fault of theirs."""
POLICY = Policy(sleep_seconds=20.0, wake_seconds=10.0)
STANDBY = make_spec("r", asleep=True, stall_seconds=5.0)
SERVING = msgspec.structs.replace(STANDBY, asleep=False)


@dataclass
class World:
    """One ready replica; requests for sleep are answered when the test says so."""

    spec: ReplicaSpec = STANDBY
    now: float = 100.0
    attempt: AttemptFacts = field(
        default_factory=lambda: AttemptFacts(
            attempt=1,
            launch_digest=launch_digest(STANDBY),
            launched_at_seconds=50.0,
            pids=(7,),
            probe=Probe.READY,
            ready_at_seconds=60.0,
            idle_in_a_row=2,
        )
    )
    asked: list[str] = field(default_factory=list)
    crashes: int = 0

    def step(self, seconds: float = 1.0, **sleep: object) -> Decision:
        """Let time pass, with what became of the request, and carry out what is decided."""
        self.now += seconds
        facts = replace(self.attempt.sleep, **sleep)  # type: ignore[arg-type]  # fields by name
        self.attempt = replace(self.attempt, sleep=facts)
        replica = ReplicaFacts(
            "r", self.spec, generation=1, last_attempt=1, crashes=self.crashes, attempt=self.attempt
        )
        (decision,) = plan([replica], wish_known=True, now=self.now, policy=POLICY)
        for action in decision.actions:
            if isinstance(action, SetSleep):
                self._set(action)
            elif isinstance(action, ForgetCrashes):
                self.crashes = 0
        return decision

    def _set(self, action: SetSleep) -> None:
        since = self.now if action.restarts_clock else self.attempt.sleep.since_seconds
        asks = action.state in (FALLING_ASLEEP, WAKING)
        self.asked += [action.state] if asks else []
        request = RequestState.RUNNING if asks else RequestState.NONE
        self.attempt = replace(
            self.attempt, sleep=SleepFacts(action.state, since, request, hindrance=action.note)
        )

    @property
    def state(self) -> str:
        return self.attempt.sleep.state

    def fall_asleep(self) -> None:
        self.step()
        self.step(request=RequestState.DONE)
        assert self.state == ASLEEP


def ends(decision: Decision) -> list[Terminate]:
    return [action for action in decision.actions if isinstance(action, Terminate)]


def test_a_standby_sleeps_once_it_is_ready_and_idle_and_wakes_when_it_is_to_serve() -> None:
    world = World()
    world.attempt = replace(world.attempt, idle_in_a_row=1)
    world.step()
    assert world.state == AWAKE, "one scrape proves no rest"
    world.attempt = replace(world.attempt, idle_in_a_row=2)
    decision = world.step()
    assert (world.state, decision.state) == (FALLING_ASLEEP, ObservedState.READY)
    world.step(request=RequestState.DONE)
    assert world.step(100).actions == (), "nothing is asked again of one that sleeps as it is to"
    world.spec = SERVING
    world.step()
    assert world.state == WAKING
    world.step(request=RequestState.DONE)
    assert world.state == WAKING, "the engine's word is not enough: its health was not asked for since"
    world.step(answers_again=True)
    assert world.state == AWAKE
    assert world.asked == [FALLING_ASLEEP, WAKING]
    assert world.step(100).actions == ()


def test_a_sleeper_is_never_stalled_nor_dead_for_want_of_health() -> None:
    world = World()
    world.fall_asleep()
    world.attempt = replace(world.attempt, still_seconds=1e6, has_generated=True, probe=Probe.UNREACHABLE)
    decision = world.step(1e5)
    assert (decision.state, decision.actions, decision.stalled) == (ObservedState.READY, (), False)
    world.attempt = replace(world.attempt, probe=Probe.DEAD, probe_reason="its port is closed")
    (end,) = ends(world.step())
    assert end.blames_engine
    assert "dead in its sleep: its port is closed" in end.why


def test_crashes_are_forgotten_in_sleep_too_once_it_has_been_ready_for_long_enough() -> None:
    world = World(crashes=3, now=60.0)  # it has just become ready
    world.fall_asleep()
    world.step()
    assert world.crashes == 3, "that is no long time"
    decision = world.step(POLICY.stable_seconds)
    assert (world.crashes, world.state, decision.state) == (0, ASLEEP, ObservedState.READY)
    assert world.step(100).actions == (), "once"


@pytest.mark.parametrize("on_its_way", [FALLING_ASLEEP, WAKING])
def test_crashes_count_on_while_it_is_on_its_way_into_sleep_or_out_of_it(on_its_way: str) -> None:
    world = World(crashes=3)
    world.attempt = replace(world.attempt, ready_at_seconds=world.now)
    world.step()
    if on_its_way == WAKING:
        world.step(request=RequestState.DONE)
        world.spec = SERVING
        world.step()
    patient = replace(world.attempt, ready_at_seconds=world.now - POLICY.stable_seconds)
    world.attempt = patient
    world.step()
    assert (world.state, world.crashes) == (on_its_way, 3)


@pytest.mark.parametrize(
    ("told", "seconds", "why"),
    [
        ({"request": RequestState.FAILED, "error": "status 500"}, 1.0, "did not wake: status 500"),
        ({}, 11.0, "did not wake within 10 s: no answer"),
        ({"request": RequestState.DONE}, 11.0, "did not wake within 10 s: it is not healthy"),
    ],
)
def test_what_does_not_wake_in_time_is_ended_as_a_crash(
    told: dict[str, object], seconds: float, why: str
) -> None:
    world = World()
    world.fall_asleep()
    world.spec = SERVING
    world.step()
    (end,) = ends(world.step(seconds, **told))
    assert (end.why, end.blames_engine, end.stalled) == (why, True, False)


@pytest.mark.parametrize("asleep", [True, False])
def test_a_new_agent_asks_again_and_the_bound_of_a_waking_goes_on(asleep: bool) -> None:
    world = World()
    world.step()
    world.spec = STANDBY if asleep else SERVING
    world.step(request=RequestState.NONE)
    assert world.state == (FALLING_ASLEEP if asleep else WAKING)
    assert world.asked == [FALLING_ASLEEP, world.state]
    if not asleep:
        asked_at = world.attempt.sleep.since_seconds
        for _ in range(3):
            world.step(request=RequestState.NONE)
        assert world.attempt.sleep.since_seconds == asked_at
        assert ends(world.step(8.0)), "no restart of the agent makes it wait for ever"


def test_what_cannot_be_put_to_sleep_is_woken_and_stays_awake_with_the_reason() -> None:
    world = World()
    world.step()
    world.step(request=RequestState.FAILED, error="status 500: no memory")
    assert world.state == WAKING
    why = world.attempt.sleep.hindrance
    assert why == "it could not be put to sleep: status 500: no memory"
    world.step(request=RequestState.DONE, answers_again=True)
    world.attempt = replace(world.attempt, sleep=replace(world.attempt.sleep, hindrance=why))
    assert (world.state, world.step(100).actions) == (AWAKE, ())


@pytest.mark.parametrize("wanted", [WantedState.STOP, WantedState.DRAIN])
def test_a_sleeper_that_is_let_go_ends_at_once(wanted: WantedState) -> None:
    world = World()
    world.fall_asleep()
    world.spec = msgspec.structs.replace(STANDBY, wanted=wanted)
    assert ends(world.step())


PATIENT = Policy(stop_grace_seconds=0.5, backoff_base_seconds=0.05, crash_limit=3)
HASTY = replace(PATIENT, wake_seconds=0.5)


@contextmanager
def local_node(folder: Path, policy: Policy, adapter: EngineAdapter | None = None) -> Iterator[LocalNode]:
    node = LocalNode(folder, adapter=adapter or SimulatedAdapter(), policy=policy)
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with local_node(tmp_path / "home", PATIENT) as node:
        yield node


def standby(**options: object) -> ReplicaSpec:
    options = {"enable_sleep_mode": True, "ttft_ms": 1.0, "itl_ms": 1.0} | options
    return make_spec("r1", engine="simulated", engine_options=options, asleep=True)


def awake(spec: ReplicaSpec) -> ReplicaSpec:
    return msgspec.structs.replace(spec, asleep=False)


def wait_sleep(node: LocalNode, state: str) -> None:
    node.wait(
        lambda: node.replica("r1").sleep_state == state, f"r1 is {state or 'awake'}", seconds=WAIT_SECONDS
    )


def wait_ready(node: LocalNode, *, attempt: int = 1) -> ReplicaObserved:
    def is_ready() -> bool:
        seen = node.replica("r1")
        return (seen.state, seen.attempt) == (ObservedState.READY, attempt)

    node.wait(is_ready, f"attempt {attempt} of r1 is ready", seconds=WAIT_SECONDS)
    return node.replica("r1")


def ask(node: LocalNode, path: str, body: object = None, *, key: bool = True) -> int:
    replica = node.replica("r1")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {node.runner.api_key('r1', replica.attempt)}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{replica.address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - an address of its own
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


QUESTION = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def test_an_engine_sleeps_outlives_its_agent_and_answers_once_it_is_woken(node: LocalNode) -> None:
    node.wish(standby())
    wait_ready(node)
    wait_sleep(node, ASLEEP)
    assert ask(node, "/v1/completions", QUESTION) == 503
    assert ask(node, "/wake_up", {}, key=False) == 401, "control paths are nobody else's"
    node.scraper.stop()
    node.journal.close()
    node.begin()  # another agent, on the same home
    looks = node.scraper.state(("r1", 1)).progress.looked_at_seconds
    node.wait(
        lambda: (node.scraper.state(("r1", 1)).progress.looked_at_seconds or 0) > (looks or 0),
        "the new agent has looked at it",
        seconds=WAIT_SECONDS,
    )
    seen = node.replica("r1")
    assert (seen.state, seen.sleep_state, seen.attempt) == (ObservedState.READY, ASLEEP, 1)
    node.wish(awake(standby()))
    wait_sleep(node, AWAKE)
    woken = node.replica("r1")
    assert ask(node, "/v1/completions", QUESTION) == 200
    assert (woken.attempt, woken.restarts) == (1, 0), "it is the same process"
    assert woken.woke_in_seconds is not None
    node.wish(standby())
    wait_sleep(node, ASLEEP)


@pytest.mark.parametrize(
    ("fault", "policy"), [({"fail_waking": True}, PATIENT), ({"wake_seconds": 3600.0}, HASTY)]
)
def test_an_engine_that_does_not_wake_is_started_anew_and_awake(
    tmp_path: Path, fault: dict[str, object], policy: Policy
) -> None:
    with local_node(tmp_path / "home", policy) as node:
        spec = standby(**fault)
        node.wish(spec)
        wait_ready(node)
        wait_sleep(node, ASLEEP)
        node.wish(awake(spec))
        again = wait_ready(node, attempt=2)
        assert again.sleep_state == AWAKE
        assert again.last_exit is not None
        assert again.last_exit.why.startswith("did not wake")
        assert ask(node, "/v1/completions", QUESTION) == 200


def test_no_look_at_health_meets_an_engine_that_goes_to_sleep_or_wakes(tmp_path: Path) -> None:
    # Each second half a second long, and more often while it wakes: without care, a request meets one.
    adapter = DelicateAdapter(health_seconds=0.5, wake_seconds=1.0)
    with local_node(tmp_path / "home", PATIENT, adapter) as node:
        options = {"enable_memory_saver": True}
        spec = make_spec("r1", engine=adapter.name, engine_options=options, asleep=True)
        for _ in range(2):
            node.wish(spec)
            wait_sleep(node, ASLEEP)
            node.wish(awake(spec))
            wait_sleep(node, AWAKE)
        seen = node.replica("r1")
        assert (seen.attempt, seen.restarts, seen.last_exit) == (1, 0, None)


@pytest.mark.parametrize("asleep", [True, False])
def test_an_agent_started_anew_while_memory_goes_asks_again_and_the_engine_lives(
    tmp_path: Path, *, asleep: bool
) -> None:
    adapter = DelicateServerAdapter(seconds=1.0)
    with local_node(tmp_path / "home", PATIENT, adapter) as node:
        spec = make_spec("r1", engine=adapter.name, engine_options={"enable_memory_saver": True}, asleep=True)
        node.wish(spec)
        wait_sleep(node, FALLING_ASLEEP)
        node.reconciler.tick()
        node.scraper.stop()
        node.journal.close()
        node.begin()  # another agent, who knows of no request
        node.wish(spec if asleep else awake(spec))
        wait_sleep(node, ASLEEP if asleep else AWAKE)
        node.wish(awake(spec))
        wait_sleep(node, AWAKE)
        seen = node.replica("r1")
        assert (seen.attempt, seen.restarts, seen.last_exit) == (1, 0, None)


def test_what_cannot_sleep_says_why_and_serves_on(node: LocalNode) -> None:
    weights = ModelFile(path="model.safetensors", size_bytes=80_000_000_000, sha256="00" * 32)
    assert why_no_sleep("torch", {}).startswith("the built-in engine does not sleep")
    node.wish(make_spec("r1", engine="simulated", asleep=True))
    node.wait(
        lambda: node.replica("r1").sleep_note == "its engine sleeps only with the option enable_sleep_mode",
        "it says what is missing",
        seconds=WAIT_SECONDS,
    )
    spec = standby()
    big = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, files=(weights,)))
    node.host_memory = HostMemory(256_000_000_000, 64_000_000_000)
    assert node.sleep.why_awake(big) == (
        "its weights take 80.0 GB of the host's memory while it sleeps, and less is free"
    )
    node.host_memory = HostMemory(256_000_000_000, 80_000_000_000)
    assert node.sleep.why_awake(big) == ""


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/health", [], 200),
        ("/sleep", [], 401),
        ("/metrics", [(b"authorization", b"Bearer wrong")], 401),
        ("/sleep", [(b"authorization", b"Bearer the-key")], 200),
        ("/sleep", [(b"authorization", b"Bearer the-key"), (b"authorization", b"Bearer x")], 401),
    ],
)
def test_every_path_of_vllm_but_health_asks_for_the_key(
    monkeypatch: pytest.MonkeyPatch, path: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    sent: list[dict[str, object]] = []

    async def app(_scope: object, _receive: object, _send: object) -> None:
        sent.append({"status": 200})

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(RequireKey(app)(scope, send, send))
    assert sent[0]["status"] == status
