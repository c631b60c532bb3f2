"""Answers that take long are kept, in proportion to what they took."""

from __future__ import annotations

import threading

import pytest

from exaserve_ops.dashboard.kept import MOST_ANSWERS, KeptAnswers


class SlowQuestion:
    """A clock, and a question whose answer takes some of its time."""

    def __init__(self, took_seconds: float) -> None:
        self.now_seconds = 100.0
        self.took_seconds = took_seconds
        self.asked = 0

    def monotonic(self) -> float:
        return self.now_seconds

    def find(self) -> int:
        self.asked += 1
        self.now_seconds += self.took_seconds
        return self.asked


def test_an_answer_that_took_long_is_kept_and_found_anew_afterwards() -> None:
    question = SlowQuestion(took_seconds=1.0)
    answers: KeptAnswers[int] = KeptAnswers(question.monotonic)
    assert answers.get("plan", question.find).answer == 1
    question.now_seconds += 19
    assert answers.get("plan", question.find).answer == 1
    assert answers.get("another", question.find).answer == 2
    question.now_seconds += 2
    assert answers.get("plan", question.find).answer == 3


def test_an_answer_that_took_little_is_never_stale() -> None:
    question = SlowQuestion(took_seconds=0.05)
    answers: KeptAnswers[int] = KeptAnswers(question.monotonic)
    assert [answers.get("plan", question.find).answer for _ in range(3)] == [1, 2, 3]


def test_what_could_not_be_found_is_asked_for_again() -> None:
    question = SlowQuestion(took_seconds=1.0)
    answers: KeptAnswers[int] = KeptAnswers(question.monotonic)

    def fail() -> int:
        raise LookupError("deleted")

    with pytest.raises(LookupError):
        answers.get("plan", fail)
    assert answers.get("plan", question.find).answer == 1


def test_old_answers_make_room_for_new_ones() -> None:
    question = SlowQuestion(took_seconds=1.0)
    answers: KeptAnswers[int] = KeptAnswers(question.monotonic)
    for index in range(MOST_ANSWERS + 1):
        answers.get(index, question.find)
        question.now_seconds -= question.took_seconds  # all at the same time
    assert answers.get(MOST_ANSWERS, question.find).answer == MOST_ANSWERS + 1
    assert answers.get(0, question.find).answer == MOST_ANSWERS + 2


def test_many_viewers_at_once_have_it_found_once() -> None:
    question = SlowQuestion(took_seconds=1.0)
    answers: KeptAnswers[int] = KeptAnswers(question.monotonic)
    begun, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def find_slowly() -> int:
        begun.set()
        assert go_on.wait(10)
        return question.find()

    viewers = [
        threading.Thread(target=lambda: seen.append(answers.get("plan", find_slowly).answer))
        for _ in range(4)
    ]
    for viewer in viewers:
        viewer.start()
    assert begun.wait(10)
    go_on.set()
    for viewer in viewers:
        viewer.join(10)
    assert seen == [1, 1, 1, 1]
