"""What an engine's start-up log says of the room it has for KV: its own figure, which labels may miss.

Of a model with layers of several kinds the product of a page's labels is not what fits, and the number of
tokens in the log need not be either: where log lines contradict one another, the one that says how many
whole requests fit is believed, since it counts every kind of layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from workers.engines.base import EngineSample

_NUMBER = r"([0-9][0-9,]{0,18})(?![0-9,])"
"""Of a bounded length: a line of a log may be as long as a block, and no number is."""
_TOKENS = re.compile(rf"(?:GPU|CPU|XPU|TPU) KV cache size: {_NUMBER} tokens")
_POOL = re.compile(rf"\bmax_total_num_tokens={_NUMBER}")
_CONCURRENCY = re.compile(
    rf"Maximum concurrency for {_NUMBER} tokens per request: ([0-9][0-9,]{{0,18}}(?:\.[0-9]{{1,18}})?)x"
)
_BLOCK = re.compile(rf"Setting attention block size to {_NUMBER} tokens")
_BLOCKS = re.compile(rf"# (?:GPU|CUDA) blocks: {_NUMBER}|\bGPU blocks: {_NUMBER}")
_AGREEMENT_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class LoggedCapacity:
    """Figures of the log. `None`: no line says so. Of several lines the last one counts."""

    tokens: int | None = None
    request_tokens: int | None = None
    """Length of the requests that `requests` is about."""
    requests: float | None = None
    """How many whole requests of that length fit."""
    block_tokens: int | None = None
    """Of a block of attention, where the engine chose it itself."""
    blocks: int | None = None

    @property
    def capacity_tokens(self) -> int | None:
        """What fits, by the figure that is believed."""
        if self._by_requests is None:
            return self.tokens
        return self._by_requests if self.tokens is None or self.disagrees else self.tokens

    @property
    def disagrees(self) -> bool:
        """Whether its two figures differ by more than rounding."""
        if self._by_requests is None or self.tokens is None:
            return False
        return abs(self._by_requests - self.tokens) > _AGREEMENT_RATIO * max(self._by_requests, self.tokens)

    @property
    def _by_requests(self) -> int | None:
        if self.requests is None or self.request_tokens is None:
            return None
        return round(self.requests * self.request_tokens)


def read_capacity(lines: Iterable[str]) -> LoggedCapacity:
    """Look for what a log says of KV room."""
    found = LoggedCapacity()
    for line in lines:
        if tokens := _TOKENS.search(line) or _POOL.search(line):
            found = replace(found, tokens=_whole(tokens[1]))
        if most := _CONCURRENCY.search(line):
            requests = float(most[2].replace(",", ""))
            found = replace(found, request_tokens=_whole(most[1]), requests=requests)
        if block := _BLOCK.search(line):
            found = replace(found, block_tokens=_whole(block[1]))
        if blocks := _BLOCKS.search(line):
            found = replace(found, blocks=_whole(blocks[1] or blocks[2]))
    return found


def with_capacity(sample: EngineSample, logged: LoggedCapacity) -> EngineSample:
    """A sample with the log's figures in the place of what was worked out of labels."""
    tokens = logged.capacity_tokens
    block_tokens = logged.block_tokens or sample.kv_block_tokens
    if tokens is None:
        is_off = logged.block_tokens not in (None, sample.kv_block_tokens)
        return (
            replace(sample, kv_capacity_is_estimate=True) if is_off and sample.kv_capacity_tokens else sample
        )
    notes = sample.notes
    if logged.disagrees:
        said = f"the log says {logged.tokens} tokens of KV and room for {tokens}: the latter counts"
        notes = (*notes, said)
    return replace(
        sample,
        kv_capacity_tokens=tokens,
        kv_capacity_is_estimate=False,
        kv_block_tokens=block_tokens,
        kv_total_blocks=tokens // block_tokens if block_tokens else sample.kv_total_blocks,
        notes=notes,
    )


def _whole(text: str) -> int:
    return int(text.replace(",", ""))
