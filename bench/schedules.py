"""`python -m bench.schedules --count 10000 --json`: random schedules against what transformers says.

For each of a few small models (Llama with scaled rope, Qwen2 with sliding windows in its upper layers,
Qwen3 with explicit head size) transformers generates greedily, once, for a set of prompts that share
beginnings. Then the built-in engine's scheduler, allocator and model serve random schedules of those
prompts: arrivals, lengths, cancellations, limits and tiny pools are drawn, so that requests are chunked,
batched with others, set back, and find parts of one another in cache. What a pool held stays in it for
some schedules more, so that blocks are evicted, too.

Below most pools lie tiers of host memory and disk, mostly smaller than what they are to hold: blocks leave
and come back, by requests, by announcements, by preemption, in order of use or of frequency. The disk is
slow at random, bytes on it change, it stops taking writes, and host memory ends. Slots that nobody owns are
full of rubbish, and at the end every tier must come to be empty.

After each step every held block is checked to have as many holders as the allocator counts, and to be
shared only by sequences that begin alike up to its end; what nobody holds and no prefix names is overwritten
with rubbish, so that a block read after it was freed shows. At the end nothing may be held.

Prompts whose two best next tokens are closer than rounding are left out, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from bench.stage_threads import join_parts, load_parts
from bench.tier_rig import TierPlan, TierRig, draw_plan
from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.model import StepModel
from workers.engines.torch_engine.sampling import Choice
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.sessions import Turn
from workers.protocol.digests import KV_BLOCK_TOKENS

CPU = torch.device("cpu")
MOST_BLOCKS = 40
FEWEST_BLOCKS = 10
"""The longest request takes as many."""
LONGEST_ANSWER = 48
_RUBBISH = 1e4
_TIE = 1e-3
_SCHEDULES_PER_POOL = 6
_MOST_STEPS = 3000
_TIERED_RATIO = 0.7
_TIERED_PROMPTS = 6
_ANNOUNCED_STEPS = 3
"""Every other arrival is announced so long before, if it does not arrive at once."""

_SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SMALL, rope_parameters=_LLAMA3)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **_SMALL,
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SMALL, head_dim=16)),
}


class ScheduleError(AssertionError):
    """A schedule went wrong; the message says how."""


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and what follows it greedily."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a schedule."""

    known: Known
    max_tokens: int
    step: int
    cancelled_at: int | None = None
    """Step before which it is cancelled, if it still runs."""


@dataclass
class Tally:
    """What happened, added up over schedules."""

    schedules: int = 0
    steps: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0
    evictions: int = 0
    tiered_schedules: int = 0
    """With host memory or disk below the pool, and what moved there."""
    host_blocks_out: int = 0
    host_blocks_in: int = 0
    disk_blocks_out: int = 0
    disk_blocks_in: int = 0
    damaged_blocks: int = 0
    preemptions_swapped: int = 0
    thrashes: int = 0
    tiers_failed: int = 0


@dataclass
class SubjectModel:
    """One model in our engine, with prompts whose answers are known."""

    model: StepModel
    pools: tuple[KvPool, ...]
    """One for each stage that the layers are split over."""
    known: list[Known]
    near_ties: int
    tally: Tally = field(default_factory=Tally)


def make_subject(name: str, *, prompts: int, seed: int = 0, stages: int = 1) -> SubjectModel:
    """Draw a model of `MODELS`, ask transformers for the answers, load it into our engine.

    With several stages, each has layers, blocks and a thread of its own, and gloo between them.
    """
    torch.set_num_threads(1)  # so small a model that threads only wait for one another
    kind, config = MODELS[name]
    if stages > config.num_hidden_layers:
        told = {**config.to_dict(), "num_hidden_layers": stages, "layer_types": None}
        config = type(config)(**told)
    torch.manual_seed(seed)
    reference: PreTrainedModel = kind(config).eval()  # type: ignore[no-untyped-call]  # theirs
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms too, which start as 0 and 1
            parameter.normal_(std=0.3)
    drawn = _draw_prompts(random.Random(f"{name} {seed}"), prompts)  # noqa: S311 - test data
    answers = [_answer(reference, prompt) for prompt in drawn]
    with tempfile.TemporaryDirectory(prefix="bench-schedules-") as folder:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
        reference.save_pretrained(folder)
        parts = load_parts(Path(folder), stages=stages, blocks=MOST_BLOCKS)
    known = [Known(p, answer) for p, answer in zip(drawn, answers, strict=True) if answer is not None]
    return SubjectModel(join_parts(parts), tuple(p.pool for p in parts), known, prompts - len(known))


def _draw_prompts(numbers: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of up to 104 tokens that begin with one of a few stems, cut anywhere."""
    stems = [[numbers.randrange(256) for _ in range(80)] for _ in range(4)]
    prompts = []
    for _ in range(count):
        stem = numbers.choice(stems)[: numbers.choice([0, 15, 16, 17, 32, 48, 63, 80])]
        prompts.append((*stem, *(numbers.randrange(256) for _ in range(numbers.randint(1, 24)))))
    return prompts


@torch.inference_mode()
def _answer(reference: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
    """Greedy tokens after a prompt; `None` if two are so close that rounding would decide."""
    tokens = torch.tensor([prompt])
    whole: torch.Tensor = reference.generate(  # type: ignore[operator]  # a mixin's method
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    logits = reference(whole).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1).values
    if (best[:, 0] - best[:, 1]).min() < _TIE:
        return None
    answer = whole[0, len(prompt) :].tolist()
    if logits.argmax(dim=-1).tolist() != answer:
        raise ScheduleError("transformers disagrees with itself")
    return tuple(answer)


def draw_schedule(numbers: random.Random, known: Sequences[Known]) -> list[Arrival]:
    """Draw what arrives when, for how long, and what is cancelled."""
    arrivals = []
    for _ in range(numbers.randint(1, 9)):
        step = numbers.randint(0, 20)
        cancelled = step + numbers.randint(0, 30) if numbers.random() < 0.2 else None  # noqa: PLR2004
        length = numbers.randint(1, LONGEST_ANSWER)
        arrivals.append(Arrival(numbers.choice(known), length, step, cancelled))
    return arrivals


class ScheduleRun:
    """One pool and its scheduler, through one schedule after another."""

    def __init__(
        self,
        subject: SubjectModel,
        limits: SchedulerLimits,
        *,
        blocks: int,
        tiers: TierPlan | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start with an empty pool of `blocks`, full of rubbish; `tiers` lie below it, and in `folder`."""
        self._subject = subject
        self._blocks = blocks
        heat = Heat(tiers.eviction if tiers else "lru")
        self._allocator = BlockAllocator(blocks, heat=heat)
        self._rig = None
        if tiers is not None and folder is not None:
            self._rig = TierRig(tiers, subject.pools[0], self._allocator, heat, folder)
        self._scheduler = Scheduler(self._allocator, limits, tiers=self._rig.store if self._rig else None)
        self._open: dict[int, tuple[Sequence, Arrival]] = {}
        self._step_number = 0
        self._evicted_before = 0
        self._spoil(range(blocks))

    def run(self, arrivals: Sequences[Arrival]) -> None:
        """Serve a schedule to its end. Raises `ScheduleError`."""
        self._open.clear()
        for self._step_number in range(_MOST_STEPS):
            self._arrive_and_leave(arrivals)
            arrived = all(arrival.step <= self._step_number for arrival in arrivals)
            if arrived and not self._open and not self._announced:
                break
            self._step()
            self._check_blocks()
        else:
            raise ScheduleError("the schedule does not end")
        use = self._allocator.use()
        if use.used or use.total != self._blocks or self._scheduler.running or self._scheduler.waiting:
            raise ScheduleError(f"at the end the pool is at {use}")
        if self._rig is not None:
            self._rig.check_empty()
            self._subject.tally.tiered_schedules += 1
        self._subject.tally.schedules += 1
        self._subject.tally.evictions += self._allocator.evicted_blocks - self._evicted_before
        self._evicted_before = self._allocator.evicted_blocks

    def close(self) -> None:
        """Empty the tiers, and add up what moved. Raises `AssertionError` if something is left in them."""
        if self._rig is None:
            return
        tally, facts = self._subject.tally, self._rig.store.facts()
        tally.host_blocks_out += facts.swapped.blocks_out["host"]
        tally.host_blocks_in += facts.swapped.blocks_in["host"]
        tally.disk_blocks_out += facts.swapped.blocks_out["disk"]
        tally.disk_blocks_in += facts.swapped.blocks_in["disk"]
        tally.damaged_blocks += facts.swapped.checksum_failures
        tally.thrashes += facts.thrash_starts
        tally.tiers_failed += sum(1 for use in facts.uses.values() if use.off_reason)
        self._rig.close()

    @property
    def _announced(self) -> list[Sequence]:
        return self._scheduler._announced  # noqa: SLF001 - the books that are checked

    def _arrive_and_leave(self, arrivals: Sequences[Arrival]) -> None:
        for number, arrival in enumerate(arrivals):
            if arrival.step - _ANNOUNCED_STEPS == self._step_number and number % 2:
                self._scheduler.prefetch(self._scheduler.chain_of(arrival.known.prompt))
            if arrival.step == self._step_number:
                sequence = Sequence(str(number), list(arrival.known.prompt))
                self._open[number] = (sequence, arrival)
                self._scheduler.add(sequence)
            if arrival.cancelled_at == self._step_number and number in self._open:
                self._scheduler.remove(self._open.pop(number)[0])
                self._subject.tally.cancelled += 1

    def _step(self) -> None:
        if self._rig is not None:
            self._rig.step()
        plan = self._scheduler.plan_step()
        tally = self._subject.tally
        tally.steps += 1
        tally.preemptions_swapped += plan.kept_below
        tally.preemptions += len(plan.preempted)
        tally.cached_tokens += sum(admission.cached_tokens for admission in plan.admissions)
        if plan.chunks:
            self._compute(plan)

    def _compute(self, plan: StepPlan) -> None:
        sampled = self._subject.model.compute(plan.chunks, lambda _: Choice(0.0, 1.0, 0.0))
        self._scheduler.complete(plan)
        for chunk, token in sampled:
            sequence = chunk.sequence
            sequence.tokens.append(token)
            self._subject.tally.tokens += 1
            _, arrival = self._open[int(sequence.request_id)]
            made = len(sequence.tokens) - len(arrival.known.prompt)
            expected = arrival.known.answer[made - 1]
            if token != expected:
                raise ScheduleError(f"token {made} is {token}, and transformers says {expected}")
            if made == arrival.max_tokens:
                self._scheduler.remove(sequence)
                self._end_turn(sequence)
                del self._open[int(sequence.request_id)]

    def _end_turn(self, sequence: Sequence) -> None:
        """Let every other request be the turn of one of a few sessions."""
        number = int(sequence.request_id)
        if self._rig is not None and number % 2:
            turn = Turn(len(sequence.tokens), 0, {}, sequence.preemptions, sequence.swaps)
            self._rig.sessions.end_turn(f"s{number % 5}", tuple(sequence.chain), turn, now=self._rig.now)

    def _check_blocks(self) -> None:
        """Compare what sequences hold with what the allocator believes; spoil what nobody may read."""
        holders = self._count_holders()
        if holders != self._allocator._references:  # noqa: SLF001 - the books that are checked
            raise ScheduleError("the allocator counts other holders than there are")
        cached = set(self._allocator._idle)  # noqa: SLF001 - the books that are checked
        if holders.keys() & cached:
            raise ScheduleError("a held block may be evicted")
        free = [block for block in range(self._blocks) if block not in holders and block not in cached]
        use = self._allocator.use()
        if (use.used, use.cached, use.free) != (len(holders), len(cached), len(free)):
            raise ScheduleError(f"{len(holders)} blocks are held, {len(free)} free, and the pool says {use}")
        self._spoil(free)
        if self._rig is not None:
            self._rig.check_books()

    def _count_holders(self) -> Counter[int]:
        holders: Counter[int] = Counter()
        contents: dict[int, list[int]] = {}
        holders.update(block for sequence in self._announced for block in sequence.blocks)
        for sequence, _ in self._open.values():
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise ScheduleError("a sequence holds a block twice")
            for index, block in enumerate(sequence.blocks):
                holders[block] += 1
                begins = sequence.tokens[: (index + 1) * KV_BLOCK_TOKENS]
                if contents.setdefault(block, begins) != begins:
                    raise ScheduleError(f"block {block} is owned by two that do not begin alike")
        return holders

    def _spoil(self, blocks: Sequences[int]) -> None:
        numbers = torch.tensor(list(blocks), dtype=torch.long)
        for pool in self._subject.pools:
            pool.keys.index_fill_(1, numbers, _RUBBISH)
            pool.values.index_fill_(1, numbers, -_RUBBISH)


def run_schedules(subject: SubjectModel, *, count: int, seed: int, with_tiers: bool = True) -> None:
    """Run `count` schedules, a few to a pool. Raises `ScheduleError`, with the seed that repeats it."""
    for first in range(0, count, _SCHEDULES_PER_POOL):
        numbers = random.Random(f"{seed} {first}")  # noqa: S311 - test data
        sequences = numbers.randint(1, 8)
        limits = SchedulerLimits(sequences, sequences + numbers.choice([0, 1, 7, 16, 40, 200]))
        tiers = draw_plan(numbers) if with_tiers and numbers.random() < _TIERED_RATIO else None
        spare = int(numbers.expovariate(0.2 if tiers is None else 0.8))
        blocks = min(FEWEST_BLOCKS + spare, MOST_BLOCKS)
        # What left comes back only if it is asked for again.
        known = subject.known if tiers is None else numbers.sample(subject.known, _TIERED_PROMPTS)
        with tempfile.TemporaryDirectory(prefix="bench-schedules-") as folder:
            try:
                pool = ScheduleRun(subject, limits, blocks=blocks, tiers=tiers, folder=Path(folder))
                for _ in range(min(_SCHEDULES_PER_POOL, count - first)):
                    pool.run(draw_schedule(numbers, known))
                pool.close()
            except (AssertionError, ValueError) as error:
                raise ScheduleError(f"seed {seed}, schedules from {first}: {error}") from error


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all models' schedules; the first that goes wrong ends its model's run and is reported."""
    began = time.monotonic()
    failures: list[str] = []
    models: dict[str, Any] = {}
    share = -(-arguments.count // len(MODELS))
    for name in MODELS:
        subject = make_subject(name, prompts=arguments.prompts, seed=arguments.seed, stages=arguments.stages)
        try:
            run_schedules(subject, count=share, seed=arguments.seed, with_tiers=arguments.stages == 1)
        except ScheduleError as error:
            failures.append(f"{name}: {error}")
        tally = subject.tally
        models[name] = {
            **{key: getattr(tally, key) for key in tally.__dataclass_fields__},
            "prompts": len(subject.known),
            "near_ties_left_out": subject.near_ties,
        }
    return {
        "schedules": sum(model["schedules"] for model in models.values()),
        "failures": failures,
        "models": models,
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(argv: Sequences[str] | None = None) -> int:
    """Run the schedules. Returns 0, or 1 if one went wrong."""
    parser = argparse.ArgumentParser(prog="bench.schedules", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=60, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stages", type=int, default=1, help="threads that the layers are split over, without lower tiers"
    )
    arguments = parser.parse_args(argv)
    result = run(arguments)
    print(json.dumps(result, indent=None if arguments.json else 2))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
