"""Drives the torch engine's parts step by step and checks its tokens against transformers."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import allocate_pool
from workers.engines.torch_engine.model import Decoder
from workers.engines.torch_engine.sampling import Sampler, sample_tokens
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits, Sequence
from workers.engines.torch_engine.shared_weights import CopyKind, map_weights
from workers.engines.torch_engine.weights import load_weights

CPU = torch.device("cpu")
POOL_BLOCKS = 256


@dataclass(frozen=True)
class Prompt:
    """A request of a schedule."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    arrives_at_step: int = 0


@dataclass
class Outcome:
    """What a schedule came to."""

    generated: list[list[int]]
    cached_tokens: list[int]
    preemptions: int
    steps: int


class Bench:
    """One model, loaded by our engine and by transformers."""

    def __init__(self, model_dir: Path, *, kv_dtype: torch.dtype = torch.float32) -> None:
        config = read_model_config(model_dir)
        weights = load_weights(
            model_dir,
            config,
            device=CPU,
            dtype=torch.float32,
            on_progress=lambda _: None,
            pack_matrices=True,
        )
        self.config, self.model_dir = config, model_dir
        pool = allocate_pool(config, POOL_BLOCKS, dtype=kv_dtype, device=CPU, compute_dtype=torch.float32)
        self.decoder = Decoder(config, weights, pool)
        self.vocabulary_size = config.vocabulary_size
        self.reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def decoder_on_shared_weights(self, cache: Path, *, packed: bool) -> Decoder:
        """A decoder as a replica has it that maps the node's copy of the weights."""
        kind = CopyKind(torch.float32, packed=packed)
        weights = map_weights(
            cache, self.model_dir, self.config, kind, model_digest="", on_progress=lambda _: None
        )
        pool = allocate_pool(self.config, POOL_BLOCKS, dtype=torch.float32, device=CPU)
        return Decoder(self.config, weights, pool)

    def run(
        self, prompts: Sequences[Prompt], limits: SchedulerLimits, *, blocks: int = POOL_BLOCKS
    ) -> Outcome:
        """Generate greedily for all prompts under one scheduler; checks that no block is lost."""
        allocator = BlockAllocator(blocks)
        scheduler = Scheduler(allocator, limits)
        sequences = [Sequence(str(n), list(p.tokens)) for n, p in enumerate(prompts)]
        outcome = Outcome([], [0] * len(prompts), 0, 0)
        open_ids = set(range(len(prompts)))
        while open_ids:
            for number, prompt in enumerate(prompts):
                if prompt.arrives_at_step == outcome.steps:
                    scheduler.add(sequences[number])
            for number in self._step(scheduler, outcome):
                sequence, prompt = sequences[number], prompts[number]
                if len(sequence.tokens) == len(prompt.tokens) + prompt.max_tokens:
                    scheduler.remove(sequence)
                    open_ids.remove(number)
            outcome.steps += 1
            assert outcome.steps < 5000, "the schedule does not end"
        use = allocator.use()
        assert use.used == 0
        assert use.free + use.cached == blocks
        outcome.generated = [
            sequence.tokens[len(prompt.tokens) :] for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        return outcome

    def _step(self, scheduler: Scheduler, outcome: Outcome) -> list[int]:
        plan = scheduler.plan_step()
        outcome.preemptions += len(plan.preempted)
        for admission in plan.admissions:
            outcome.cached_tokens[int(admission.sequence.request_id)] = admission.cached_tokens
        if not plan.chunks:
            return []
        batch = self.decoder.lay_out(plan.chunks)
        greedy = [Sampler(0.0, 1.0)] * len(batch.sampled_chunks)
        tokens = sample_tokens(self.decoder.forward(batch), greedy)
        scheduler.complete(plan)
        for chunk, token in zip(batch.sampled_chunks, tokens, strict=True):
            chunk.sequence.tokens.append(token)
        return [int(chunk.sequence.request_id) for chunk in batch.sampled_chunks]

    @torch.inference_mode()
    def assert_greedy(self, prompt: Prompt, generated: Sequences[int]) -> None:
        """Assert that transformers would have chosen each token, given the ones before it."""
        whole = torch.tensor([[*prompt.tokens, *generated]])
        logits = self.reference(whole).logits[0, len(prompt.tokens) - 1 : -1]
        assert list(generated) == logits.argmax(dim=-1).tolist()
