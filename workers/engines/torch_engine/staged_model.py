"""The decoder over several processes: each computes its layers, the first leads, the last chooses tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.torch_engine.model import ChoiceOf, Decoder
from workers.engines.torch_engine.sampling import choose_tokens
from workers.engines.torch_engine.scheduler import Chunk
from workers.engines.torch_engine.stage_group import Coming, StageGroup
from workers.engines.torch_engine.stage_wire import (
    HEADER_NUMBERS,
    MOST_MESSAGE_BYTES,
    StageWireError,
    decode_order,
    encode_order,
)

_MOST_ROWS = 1 << 24
_PARTS_OF_A_STAGE = 2
_LEAST_ROWS = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True, slots=True)
class _Header:
    """What comes before an order and the rows that go on."""

    step: int
    message_bytes: int
    rows: int
    choices: int

    def tensor(self) -> Tensor:
        return torch.tensor((self.step, self.message_bytes, self.rows, self.choices))


@dataclass(frozen=True, slots=True)
class Split:
    """When a step goes through the stages in parts."""

    most_parts: int
    least_rows: int
    """Fewer rows are computed in about the time of these."""


@dataclass(frozen=True, slots=True)
class _OpenPart:
    """What was asked of the other stages."""

    step: int
    sampled: tuple[Chunk, ...]
    answer: Tensor
    coming: Coming


def choose_split(stages: int, device_kind: str) -> Split:
    """Two parts for each stage leave a stage without work for a fifth of a step, or less."""
    return Split(_PARTS_OF_A_STAGE * stages, _LEAST_ROWS.get(device_kind, _LEAST_ROWS["cuda"]))


def split_step(chunks: Sequence[Chunk], split: Split) -> list[list[Chunk]]:
    """Split a step into parts of about as many rows, cutting chunks where it must be.

    Parts are computed in order, so a chunk's second piece finds what the first one has written.
    """
    rows = sum(chunk.count for chunk in chunks)
    parts = max(1, min(split.most_parts, rows // split.least_rows))
    size = -(-rows // parts)
    found: list[list[Chunk]] = [[]]
    room = size
    for chunk in chunks:
        at = chunk.start
        while at < chunk.end:
            if room == 0:
                found.append([])
                room = size
            count = min(room, chunk.end - at)
            found[-1].append(Chunk(chunk.sequence, at, count))
            at, room = at + count, room - count
    return found


class FirstStage:
    """Computes the first layers, has the others compute theirs, and returns what the last one chose.

    Long steps go through the stages in parts, so that a stage computes one while the next has another.
    """

    def __init__(self, decoder: Decoder, group: StageGroup, *, step_seconds: float, split: Split) -> None:
        """Lead the others with `decoder`'s layers; they have `step_seconds` for each step."""
        self._decoder = decoder
        self._group = group
        self._step_seconds = step_seconds
        self._split = split
        self._step = 0

    def compute(self, chunks: Sequence[Chunk], choice_of: ChoiceOf) -> list[tuple[Chunk, int]]:
        """See `StepModel`. Raises `StageGroupError` when a stage is lost or takes too long."""
        open_parts = [self._begin(part, choice_of) for part in split_step(chunks, self._split)]
        return [answered for part in open_parts for answered in self._finish(part)]

    def _begin(self, chunks: Sequence[Chunk], choice_of: ChoiceOf) -> _OpenPart:
        batch = self._decoder.lay_out(chunks)
        hidden = self._decoder.forward(batch)
        self._step += 1
        choices = [choice_of(chunk) for chunk in batch.sampled_chunks]
        answer = torch.empty(1 + len(choices), dtype=torch.long)
        # Before anything is sent: who sends waits for who receives, and they must never wait in a circle.
        coming = self._group.expect(answer)
        message = encode_order(batch.groups, choices)
        header = _Header(self._step, len(message), len(hidden), len(choices))
        told = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        _send_rows(self._group, header, told, hidden, seconds=self._step_seconds)
        return _OpenPart(self._step, batch.sampled_chunks, answer, coming)

    def _finish(self, part: _OpenPart) -> list[tuple[Chunk, int]]:
        part.coming.wait(seconds=self._step_seconds)
        step, *tokens = part.answer.tolist()
        if step != part.step:
            raise StageWireError(f"an answer to step {step}, and this is {part.step}")
        return list(zip(part.sampled, tokens, strict=True))


class LaterStage:
    """Computes its layers for whatever comes from the stage before."""

    def __init__(
        self, decoder: Decoder, group: StageGroup, *, hidden_size: int, blocks: int, step_seconds: float
    ) -> None:
        """Serve `group` with `decoder`'s layers, `[rows, hidden_size]` in and, unless it is the last, out."""
        self._decoder = decoder
        self._group = group
        self._hidden_size = hidden_size
        self._blocks = blocks
        self._step_seconds = step_seconds
        self._is_last = decoder.is_last

    def serve_step(self) -> None:
        """Wait for a step, compute it, pass it on. Raises `StageGroupError`, `StageWireError`."""
        told = torch.empty(HEADER_NUMBERS, dtype=torch.long)
        # Requests may be long in coming: whether the others live is not judged by that.
        self._group.receive(told, seconds=None)
        header = _Header(*told.tolist())
        if not (0 < header.rows <= _MOST_ROWS and 0 < header.message_bytes <= MOST_MESSAGE_BYTES):
            raise StageWireError(f"{header} cannot be")
        itemsize = self._decoder.dtype.itemsize
        payload = torch.empty(
            header.message_bytes + header.rows * self._hidden_size * itemsize, dtype=torch.uint8
        )
        self._group.receive(payload, seconds=self._step_seconds)
        message = payload[: header.message_bytes]
        order = decode_order(message.numpy(), total_blocks=self._blocks)
        batch = self._decoder.lay_out_groups(order.groups)
        if len(batch.tokens) != header.rows or len(order.choices) != header.choices:
            raise StageWireError(f"{header} is not of its order, which has {len(batch.tokens)} rows")
        rows = payload[header.message_bytes :].view(self._decoder.dtype).view(header.rows, self._hidden_size)
        result = self._decoder.forward(batch, rows.to(self._decoder.device))
        if not self._is_last:
            _send_rows(self._group, header, message, result, seconds=self._step_seconds)
            return
        tokens = choose_tokens(result, order.choices)
        self._group.send(torch.tensor((header.step, *tokens)), seconds=self._step_seconds)


def _send_rows(
    group: StageGroup, header: _Header, message: Tensor, hidden: Tensor, *, seconds: float
) -> None:
    payload = torch.empty(len(message) + hidden.nbytes, dtype=torch.uint8)
    payload[: len(message)] = message
    payload[len(message) :].view(hidden.dtype).view(hidden.shape).copy_(hidden)
    group.send(header.tensor(), seconds=seconds)
    group.send(payload, seconds=seconds)
