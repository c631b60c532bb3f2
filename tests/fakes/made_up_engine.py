"""An engine made of arithmetic for the checks of a validation, well-behaved unless it is told otherwise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from exaserve_ops.validation.domain.asking import (
    Answer,
    Ask,
    AskAll,
    Finding,
    LaunchAgain,
    Launched,
    LaunchWith,
    Load,
    LookAtLoad,
    Need,
    Procedure,
    Rest,
    SetAsleep,
    Slept,
    Subject,
)

BLOCK = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz "
SUBJECT = Subject(
    "torch",
    vocabulary=1000,
    context_tokens=512,
    forecast_tokens=(4096, 4096),
    most_at_once=8,
    most_launches=6,
    why_no_sleep="",
)


@dataclass
class MadeUpEngine:
    """Answers by hashing; each fault is one switch."""

    launch: int = 0
    total_blocks: int | None = 256
    tells_tokens: bool = True
    differs_each_time: bool = False
    differs_by_launch: bool = False
    caches: bool = True
    ignores_stop: bool = False
    rewrites_turns: bool = False
    most_context: int = 512
    takes_too_long_contexts: bool = False
    fails_beyond: int = 1000
    """So many at once and more fail."""
    leaked_ratio: float = 0.0
    slow_after_rest: float = 0.0
    summit: tuple[int, int] = (4, 2048)
    """Most requests at once and most tokens in a step with which it is quickest."""
    setting: tuple[int, int] | None = None
    launched: list[tuple[int, int]] = field(default_factory=list)
    """Settings in the order in which they were asked for; 0: not told."""
    usual_setting: tuple[int, int] = (8, 1024)
    """What it does where it is not told."""
    launches_again: bool = True
    cold_asks: int = 0
    """So many requests after each launch take twenty times as long."""
    is_cold_for: int = 0
    refuses_from: int = 1 << 30
    """It does not start with so many tokens in a step."""
    sleeps: bool = True
    """Otherwise it says so, and falls asleep after all."""
    wakes: bool = True
    is_asleep: bool = False
    forgets_in_sleep: bool = False
    cached: set[tuple[int, ...]] = field(default_factory=set)
    asked: int = 0
    rested: float = 0.0
    is_rested: bool = False

    def play(self, procedure: Procedure) -> Finding:
        """Give a check all that it needs, until it has found something."""
        try:
            need = next(procedure)
            while True:
                need = procedure.send(self.give(need))
        except StopIteration as ended:
            finding: Finding = ended.value
            return finding

    def give(self, need: Need) -> list[Answer] | Load | Launched | Slept | None:
        match need:
            case AskAll():
                return [self.answer(ask, need.at_once) for ask in need.asks]
            case LookAtLoad():
                blocks = self.total_blocks
                return Load(blocks, BLOCK if blocks is not None else None, self.leaked_ratio, 0, 0)
            case Rest(seconds):
                self.rested += seconds
                self.is_rested = True
            case LaunchAgain():
                self.launch += 1
                self.cached.clear()
                return Launched(self.launches_again, "" if self.launches_again else "CUDA out of memory")
            case LaunchWith(options):
                return self.launch_with(options)
            case SetAsleep(asleep):
                return self.set_asleep(asleep)
        return None

    def launch_with(self, options: Mapping[str, int]) -> Launched:
        told = tuple(options.get(name, 0) for name in ("max_num_seqs", "max_num_batched_tokens"))
        self.launched.append((told[0], told[1]))
        if told[1] >= self.refuses_from:
            return Launched(done=False, why="CUDA out of memory")
        usual = self.usual_setting
        self.setting = (told[0] or usual[0], told[1] or usual[1])
        self.is_cold_for = self.cold_asks
        self.cached.clear()
        return Launched(done=True)

    def set_asleep(self, asleep: bool) -> Slept:
        if asleep:
            self.launch += self.forgets_in_sleep
            self.is_asleep = True
            return Slept(self.sleeps, "" if self.sleeps else "the host has no room for its weights")
        if self.is_asleep and not self.wakes:
            return Slept(done=False, why="its replica was started anew")
        self.is_asleep = False
        return Slept(done=True, seconds=2.5)

    @property
    def slowness(self) -> float:
        """By how many times its setting slows it down: twice for each rung from the summit."""
        if self.setting is None:
            return 1.0
        ratios = (mine / best for mine, best in zip(self.setting, self.summit, strict=True))
        return math.prod(max(ratio, 1 / ratio) for ratio in ratios)

    def answer(self, ask: Ask, at_once: int) -> Answer:
        self.asked += 1
        if at_once >= self.fails_beyond:
            return Answer(500, error="out of memory")
        if self.is_asleep:
            return Answer(503, error="it sleeps")
        prompt = self.prompt_of(ask)
        if len(prompt) + ask.max_tokens > self.most_context and not self.takes_too_long_contexts:
            return Answer(400, error=f"{len(prompt)} tokens are too many")
        tokens = self.tokens_of(prompt, ask.max_tokens)
        text = "".join(LETTERS[token % len(LETTERS)] for token in tokens)
        finish = "length"
        if ask.stop and ask.stop[0] in text and not self.ignores_stop:
            text, finish = text[: text.index(ask.stop[0])], "stop"
        ttft = 0.01 + 0.0001 * len(prompt) + (self.slow_after_rest if self.is_rested else 0.0)
        ttft *= self.slowness * (20 if self.is_cold_for > 0 else 1)
        self.is_cold_for -= 1
        return Answer(
            200,
            text=text,
            token_ids=tokens if self.tells_tokens else (),
            prompt_token_ids=prompt if self.tells_tokens else (),
            prompt_tokens=len(prompt),
            cached_tokens=self.find_cached(prompt),
            finish_reason=finish,
            ttft_seconds=ttft,
            # Up to four at once cost one another nothing.
            seconds=(ttft + 0.01 * ask.max_tokens * self.slowness) * max(1.0, at_once / 4),
        )

    def prompt_of(self, ask: Ask) -> tuple[int, ...]:
        if not ask.messages:
            return ask.tokens
        written = "".join(f"<{role}>{text}" for role, text in ask.messages)
        if self.rewrites_turns and len(ask.messages) > 1:
            written = written.upper()
        return tuple(map(ord, written))

    def tokens_of(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        salt = f"{self.asked if self.differs_each_time else 0}/{self.launch if self.differs_by_launch else 0}"
        return tuple(
            hashlib.blake2b(f"{salt}/{prompt}/{place}".encode(), digest_size=2).digest()[0]
            for place in range(count)
        )

    def find_cached(self, prompt: tuple[int, ...]) -> int:
        found = 0
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            if prompt[:end] in self.cached and end < len(prompt):
                found = end
            if self.caches:
                self.cached.add(prompt[:end])
        return found


def with_golden(finding: Finding) -> Subject:
    """The subject as it is once golden prompts were answered."""
    return replace(SUBJECT, earlier={"golden": dict(finding.details)})
