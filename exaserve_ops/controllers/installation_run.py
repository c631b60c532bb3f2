"""One run of one installation: connects, and works through the steps of its action.

A run keeps nothing that matters in memory. Where it breaks off, because a step failed, the machine went
away or this controller ended, the next run begins at the first step again; each finds what is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from exaserve_ops.inventory.domain import installation as states
from exaserve_ops.inventory.domain.drain import DRAINED
from exaserve_ops.inventory.domain.installation import (
    STEP_WORDS,
    STEPS,
    Credentials,
    HostKey,
    StepFailedError,
    StepResult,
    Target,
)
from exaserve_ops.inventory.domain.liveness import ALIVE, RETIRED, SUSPECT
from exaserve_ops.inventory.models import InstallationStep, Node, NodeInstallation
from exaserve_ops.inventory.selectors import target_of
from exaserve_ops.inventory.services import installations as services
from exaserve_ops.inventory.services.drain import drain_node
from exaserve_ops.inventory.services.joining import create_join_token
from exaserve_ops.lib import clock

ACTOR = "controller:installations"
TOKEN_LIFETIME = timedelta(minutes=10)
DRAIN_LIMIT = timedelta(minutes=5)
DRAIN_GRACE_SECONDS = 30.0
HELLO_SECONDS = 60.0
POLL_SECONDS = 0.5
LOG_EVERY_SECONDS = 1.0

Outcome = InstallationStep.Outcome


class InterruptedRunError(Exception):
    """This controller ends, or another one took over: the run is left for whoever comes next."""


class Site(Protocol):
    """A machine, connected. Every method may raise `StepFailedError`."""

    facts: dict[str, str]

    def greet(self) -> StepResult: ...
    def find_python(self) -> StepResult: ...
    def make_folder(self) -> StepResult: ...
    def find_accelerators(self) -> StepResult: ...
    def compare_clock(self) -> StepResult: ...
    def probe_ports(self) -> StepResult: ...
    def probe_network(self, *, allow_http: bool) -> StepResult: ...
    def read_identity(self) -> tuple[str, bool]: ...
    def push_bundle(self) -> StepResult: ...
    def make_environment(self) -> StepResult: ...
    def switch(self, version: str) -> None: ...
    def join(self, token: str, *, name: str, address: str, allow_http: bool) -> None: ...
    def start_service(self) -> StepResult: ...
    def restart(self) -> StepResult: ...
    def read_agent_log(self) -> str: ...
    def uninstall(self) -> StepResult: ...


class Sites(Protocol):
    """The way to machines."""

    def fetch_host_key(self, target: Target) -> HostKey:
        """Return the key that the host offers. Raises `StepFailedError`."""
        ...

    def open(
        self, target: Target, credentials: Credentials, log: Callable[[str], None]
    ) -> AbstractContextManager[Site]:
        """Connect and sign in. Raises `StepFailedError`."""
        ...


class Vault(Protocol):
    """Where credentials wait."""

    def find(self, installation_id: str) -> Credentials | None:
        """Return the credentials; `None` where none are kept any more."""
        ...

    def forget(self, installation_id: str) -> None:
        """Forget them."""
        ...


class InstallationRun:
    """Works through the steps of one installation."""

    def __init__(self, sites: Sites, vault: Vault, stop: threading.Event) -> None:
        self._sites = sites
        self._vault = vault
        self._stop = stop
        self._stack = ExitStack()
        self._step: InstallationStep | None = None
        self._unwritten: list[str] = []
        self._written_seconds = time.monotonic()
        self._boot_before = ""

    def run(self, installation_id: UUID) -> None:
        """Carry out the action. What fails is recorded; raises `InterruptedRunError` where it stops short."""
        self._row = services.begin_run(installation_id, actor=ACTOR, now=clock.now())
        with self._stack:
            for name in STEPS[self._row.action]:
                try:
                    self._take(name)
                except StepFailedError as error:
                    self._break_off(name, str(error))
                    return
        self._finish()

    # -- the course of a run -----------------------------------------------------------------------
    def _take(self, name: str) -> None:
        self._check_mine()
        self._step = services.begin_step(self._row.pk, self._row.run, name, now=clock.now())
        work: Callable[[], StepResult] = getattr(self, f"_{name}")
        result = work()
        self._check_mine()
        if result.facts:
            services.keep_facts(self._row.pk, result.facts)
            self._row.facts.update(result.facts)
            self._site.facts.update(result.facts)
        self._end(Outcome.WARNING if result.warning else Outcome.DONE, result.summary)

    def _check_mine(self) -> None:
        """Two controllers must not work on one machine: the run number says whose it is."""
        mine = NodeInstallation.objects.filter(pk=self._row.pk, run=self._row.run, status=states.WORKING)
        if self._stop.is_set() or not mine.exists():
            raise InterruptedRunError(str(self._row))

    def _end(self, outcome: str, summary: str) -> None:
        self._write_log()
        if self._step is not None:
            services.end_step(self._step, outcome, summary, now=clock.now())

    def _break_off(self, name: str, why: str) -> None:
        self._end(Outcome.FAILED, why)
        reason = f"{STEP_WORDS[name]}: {why}"
        services.advance_installation(self._row.pk, "broke", reason=reason, actor=ACTOR, now=clock.now())
        if self._row.action == states.RESTART_AGENT:
            self._say_on_node("agent_restart_failed", reason)

    def _finish(self) -> None:
        removed = self._row.action == states.REMOVE
        event = "removed" if removed else "finished"
        reason = f"{self._row.action.replace('_', ' ')} is done"
        services.advance_installation(self._row.pk, event, reason=reason, actor=ACTOR, now=clock.now())
        self._vault.forget(str(self._row.pk))
        if self._row.action == states.RESTART_AGENT:
            self._say_on_node("agent_restarted", "over SSH; it reports again, and its replicas were adopted")

    def _say_on_node(self, event: str, reason: str) -> None:
        if self._row.node_id is not None:
            services.record_on_node(self._row.node_id, event, reason=reason, actor=ACTOR, now=clock.now())

    def _log(self, text: str) -> None:
        self._unwritten.append(text)
        if time.monotonic() - self._written_seconds > LOG_EVERY_SECONDS:
            self._write_log()

    def _write_log(self) -> None:
        text = "".join(self._unwritten)
        self._unwritten.clear()
        self._written_seconds = time.monotonic()
        if text and self._step is not None:
            services.append_step_log(self._step, text)

    # -- steps; each is named in `domain.installation.STEPS` ---------------------------------------
    def _connect(self) -> StepResult:
        target = target_of(self._row)
        self._site = self._stack.enter_context(self._sites.open(target, self._credentials(), self._log))
        self._site.facts.update(self._row.facts)
        return self._site.greet()

    def _credentials(self) -> Credentials:
        if self._row.auth == NodeInstallation.Auth.AGENT:
            return Credentials()
        found = self._vault.find(str(self._row.pk))
        if found is None:
            raise StepFailedError("the password or key is not kept any more: give it again and try again")
        return found

    def _python(self) -> StepResult:
        return self._site.find_python()

    def _disk(self) -> StepResult:
        return self._site.make_folder()

    def _accelerators(self) -> StepResult:
        return self._site.find_accelerators()

    def _clock(self) -> StepResult:
        return self._site.compare_clock()

    def _ports(self) -> StepResult:
        return self._site.probe_ports()

    def _network(self) -> StepResult:
        return self._site.probe_network(allow_http=self._row.allow_http)

    def _existing(self) -> StepResult:
        other = Node.objects.filter(name=self._row.node_name).first()
        node_id, joined = self._site.read_identity()
        if joined:
            node = self._known_node(node_id)
            return StepResult(f"its agent has joined before, as {node.name}: this goes on from there")
        if other is not None and other.pk != self._row.node_id:
            raise StepFailedError(f"the name {other.name} is taken by another node: choose another one")
        return StepResult("none in this folder")

    def _known_node(self, node_id: str) -> Node:
        try:
            node = Node.objects.exclude(liveness=RETIRED).filter(pk=UUID(node_id)).first()
        except ValueError:
            node = None
        if node is None:
            raise StepFailedError(
                f"the agent in {self._row.folder} belongs to another fleet, or to a node that was removed "
                f"here: remove {self._row.folder}/home there, or name another folder"
            )
        return node

    def _bundle(self) -> StepResult:
        return self._site.push_bundle()

    def _environment(self) -> StepResult:
        return self._site.make_environment()

    def _join(self) -> StepResult:
        node_id, joined = self._site.read_identity()
        words = "had joined before"
        if not joined:
            note = f"installation over SSH on {self._row.host}"
            _, token = create_join_token(actor=ACTOR, now=clock.now(), note=note, lifetime=TOKEN_LIFETIME)
            self._site.switch(self._site.facts["version"])
            self._site.join(
                token,
                name=self._row.node_name,
                address=self._row.address,
                allow_http=self._row.allow_http,
            )
            node_id, _ = self._site.read_identity()
            words = "joined"
        node = self._known_node(node_id)
        services.keep_facts(self._row.pk, {}, node_id=node.pk)
        self._row.node_id = node.pk
        return StepResult(f"{words} as {node.name}")

    def _service(self) -> StepResult:
        self._boot_before = self._node().boot_id
        previous = self._row.facts.get("running_version", "")
        version = self._site.facts["version"]
        self._site.switch(version)
        result = self._site.start_service()
        facts = {**result.facts, "running_version": version}
        if previous and previous != version:
            facts["previous_version"] = previous
        return StepResult(result.summary, facts=facts)

    def _restart(self) -> StepResult:
        self._boot_before = self._node().boot_id
        return self._site.restart()

    def _hello(self) -> StepResult:
        if not self._wait(self._has_reported, HELLO_SECONDS):
            self._log(self._site.read_agent_log())
            self._roll_back()
            raise StepFailedError(
                f"the agent runs, but no report of it arrived within {HELLO_SECONDS:.0f} s: its last lines "
                "are in the log of this step"
            )
        node = self._node()
        return StepResult(f"{node.name} is {node.liveness}, agent {node.agent_version}")

    def _roll_back(self) -> None:
        """Return to the version that worked, where an upgrade does not report."""
        previous = self._row.facts.get("previous_version", "")
        if self._row.action != states.UPGRADE or not previous:
            return
        self._site.switch(previous)
        self._site.restart()
        services.keep_facts(self._row.pk, {"running_version": previous})
        self._log(f"rolled back to {previous}\n")

    def _drain(self) -> StepResult:
        node = self._node() if self._row.node_id else None
        if node is None or node.liveness == RETIRED:
            return StepResult("no node to drain")
        if node.liveness not in {ALIVE, SUSPECT}:
            return StepResult(f"the node is {node.liveness}: there is nothing to wait for", warning=True)
        now = clock.now()
        if node.drain_status != DRAINED:
            reason = f"removed over SSH: {self._row.action_reason or 'no reason was given'}"
            drain_node(node.pk, reason=reason, deadline_at=now + DRAIN_LIMIT, actor=ACTOR, now=now)
        limit = DRAIN_LIMIT.total_seconds() + DRAIN_GRACE_SECONDS
        if not self._wait(lambda: self._node().drain_status == DRAINED, limit):
            return StepResult("some replicas are still there: they are stopped with the agent", warning=True)
        return StepResult("no replica is left")

    def _uninstall(self) -> StepResult:
        return self._site.uninstall()

    def _retire(self) -> StepResult:
        if self._row.node_id is None:
            return StepResult("no node had joined")
        reason = f"removed over SSH: {self._row.action_reason or 'no reason was given'}"
        node = services.retire_node(self._row.node_id, reason=reason, actor=ACTOR, now=clock.now())
        return StepResult(f"now {node.name}; its keys are revoked")

    # -- waiting -----------------------------------------------------------------------------------
    def _node(self) -> Node:
        if self._row.node_id is None:
            raise StepFailedError("no node has joined from there: install again")
        return Node.objects.get(pk=self._row.node_id)

    def _has_reported(self) -> bool:
        node = self._node()
        return bool(node.boot_id) and node.boot_id != self._boot_before and node.liveness == ALIVE

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > deadline:
                return False
            if self._stop.wait(POLL_SECONDS):
                raise InterruptedRunError(str(self._row))
        return True
