"""The queue of keys: coalescing, one worker a key, back-off; and the loop that never dies."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exaserve_ops.controllers.loop import KeyQueue, LoopHealth, backoff_seconds, run_loop

KEYS = st.sampled_from("abc")


class QueueMachine(RuleBasedStateMachine):
    """Any order of adding, taking, finishing and failing, on a clock of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = KeyQueue(clock=lambda: self.now)
        self.busy: set[str] = set()
        self.owed: set[str] = set()

    @rule(key=KEYS, after=st.floats(0, 5))
    def add(self, key: str, after: float) -> None:
        self.queue.add("k", key, after_seconds=after)
        self.owed.add(key)

    @rule()
    def take(self) -> None:
        taken = self.queue.take(0.0)
        if taken is not None:
            assert taken[1] not in self.busy
            self.busy.add(taken[1])
            self.owed.discard(taken[1])

    @rule(key=KEYS, failed=st.booleans())
    def finish(self, key: str, failed: bool) -> None:
        if key in self.busy:
            self.busy.discard(key)
            self.queue.done("k", key, failed=failed)
            if failed:
                self.owed.add(key)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost_and_nothing_is_doubled(self) -> None:
        assert len(self.queue) == len(self.owed)

    def teardown(self) -> None:
        for key in list(self.busy):
            self.busy.discard(key)
            self.queue.done("k", key)
        self.now += 1000.0
        for _ in range(len(self.owed)):
            taken = self.queue.take(0.0)
            assert taken is not None, "a key that was added never comes"
            self.owed.discard(taken[1])
        assert not self.owed


TestQueueMachine: Any = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_key_that_rings_often_is_worked_on_once() -> None:
    queue = KeyQueue()
    for _ in range(100):
        queue.add("deployment", "x")
    assert queue.take(0.0) == ("deployment", "x")
    assert queue.take(0.0) is None


def test_a_key_that_rings_while_it_is_worked_on_comes_again_after() -> None:
    queue = KeyQueue()
    queue.add("node", "n")
    assert queue.take(0.0) == ("node", "n")
    queue.add("node", "n")
    assert queue.take(0.0) is None
    queue.done("node", "n")
    assert queue.take(0.0) == ("node", "n")


def test_urgent_kinds_go_first_and_have_a_thread_that_takes_nothing_else() -> None:
    queue = KeyQueue(clock=lambda: 10.0, urgent=frozenset({"routes"}))
    queue.add("deployment", "x")
    assert queue.take(0.0, urgent_only=True) is None
    queue.add("routes", "all")
    assert queue.take(0.0) == ("routes", "all")
    queue.add("routes", "all")
    assert queue.take(0.0, urgent_only=True) is None, "somebody works on it"
    queue.done("routes", "all")
    assert queue.take(0.0, urgent_only=True) == ("routes", "all")
    assert queue.take(0.0) == ("deployment", "x")


def test_key_wakes_the_thread_that_may_take_it() -> None:
    queue = KeyQueue(urgent=frozenset({"routes"}))
    taken: dict[bool, object] = {}

    def work(*, urgent_only: bool) -> None:
        taken[urgent_only] = queue.take(20.0, urgent_only=urgent_only)

    threads = {
        urgent: threading.Thread(target=work, kwargs={"urgent_only": urgent}) for urgent in (True, False)
    }
    threads[True].start()
    threads[False].start()
    queue.add("node", "n")
    threads[False].join(10)
    queue.add("routes", "all")
    threads[True].join(10)
    assert taken == {False: ("node", "n"), True: ("routes", "all")}


def test_threads_never_hold_one_key_at_once() -> None:
    queue = KeyQueue()
    held: Counter[str] = Counter()
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most
        while (taken := queue.take(0.05)) is not None:
            with lock:
                held[taken[1]] += 1
                most = max(most, held[taken[1]])
            with lock:
                held[taken[1]] -= 1
            queue.done(*taken)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(400):
        queue.add("k", str(number % 3))
    for thread in threads:
        thread.join(timeout=10)
    assert most == 1


def test_backoff_doubles_up_to_its_cap() -> None:
    pauses = [backoff_seconds(n) for n in range(1, 40)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1]) == (0.2, 0.4, 30.0)


@pytest.mark.django_db
def test_a_loop_survives_what_its_step_raises_and_counts_it() -> None:
    stop = threading.Event()
    health = LoopHealth("test")
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        stop.set()

    run_loop(health, step, stop, pause_seconds=0.0)
    assert (calls, health.failures, health.consecutive_failures) == (2, 1, 0)
