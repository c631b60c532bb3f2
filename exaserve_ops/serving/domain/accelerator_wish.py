"""What a deployment asks of accelerators: whole cards, slices, shares of a card. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANY = "any"
WHOLE = "whole"
SLICE = "slice"
MOST_PERCENT = 100
MOST_BYTES = 1 << 50
"""Of memory; more than any machine has, and within what the database keeps."""
_PROFILE = re.compile(r"(?:[1-9]c\.)?[1-9][0-9]?g\.[1-9][0-9]{0,3}gb(?:[+-][a-z0-9.]{1,12})?")
_RESOURCE_PREFIX = "nvidia.com/mig-"
"""How Kubernetes names the same slices; people paste it."""


class WishError(ValueError):
    """A wish that makes no sense; `field` names the part, the text says what would."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class MpsShare:
    """Limits of one client of NVIDIA's Multi-Process Service. 0: no such limit."""

    thread_percent: int = 0
    """Most of the card's threads that it may use at once, 1-100."""
    memory_bytes: int = 0
    """Most memory that it may allocate on each of its accelerators."""


@dataclass(frozen=True, slots=True)
class AcceleratorWish:
    """What a deployment asks for. Made by `read_wish`, which checks it."""

    kind: str = ANY
    profile: str = ""
    """Of the slice, such as `3g.40gb`; empty is any."""
    slice_memory_bytes: int = 0
    """Least memory of a slice."""
    mps: MpsShare | None = None
    spill_reason: str = ""
    """Why whole cards may be taken while no slice is free; empty: they may not."""

    @property
    def wants_slice(self) -> bool:
        """Whether a slice is asked for."""
        return self.kind == SLICE

    @property
    def text(self) -> str:
        """As it is asked for: `any`, `whole`, `slice` or `slice:3g.40gb`."""
        return f"{self.kind}:{self.profile}" if self.profile else self.kind

    @property
    def noun(self) -> str:
        """What it is called in sentences, one of it: `slice 3g.40gb`."""
        return {ANY: "accelerator", WHOLE: "whole card", SLICE: f"slice {self.profile}".strip()}[self.kind]


ANYTHING = AcceleratorWish()


def read_wish(
    accelerator: str = ANY,
    *,
    slice_memory_bytes: int = 0,
    mps_thread_percent: int = 0,
    mps_memory_bytes: int = 0,
    spill: bool = False,
    spill_reason: str = "",
) -> AcceleratorWish:
    """Check what is asked for and return it. Raises `WishError`."""
    kind, profile = _read_accelerator(accelerator)
    _check_range("mps_thread_percent", mps_thread_percent, MOST_PERCENT)
    _check_range("mps_memory_bytes", mps_memory_bytes, MOST_BYTES)
    _check_range("slice_memory_bytes", slice_memory_bytes, MOST_BYTES)
    reason = spill_reason.strip()
    if slice_memory_bytes and kind != SLICE:
        raise WishError("slice_memory_bytes", "only a slice has a least size: ask for accelerator `slice`")
    if spill and kind != SLICE:
        raise WishError("spill", "only what asks for slices can spill over to whole cards")
    if spill and not reason:
        raise WishError("spill_reason", "say why whole cards are opened to it: others will wonder")
    if reason and not spill:
        raise WishError("spill", "a reason to open whole cards is given, and they are not opened")
    mps = MpsShare(mps_thread_percent, mps_memory_bytes) if mps_thread_percent or mps_memory_bytes else None
    return AcceleratorWish(kind, profile, slice_memory_bytes, mps, reason)


def check_size(wish: AcceleratorWish, *, memory_bytes: int, accelerators: int) -> None:
    """Refuse limits that a replica of this size cannot live with. Raises `WishError`."""
    if wish.wants_slice and accelerators > 1:
        # CUDA shows a process the first MIG instance only, however many are named.
        raise WishError(
            "accelerators_per_replica", "a process can use one slice only: ask for 1, or for whole cards"
        )
    each = -(-memory_bytes // accelerators)
    limit = wish.mps.memory_bytes if wish.mps is not None else 0
    if 0 < limit < each:
        raise WishError(
            "mps_memory_bytes", f"the limit of {limit:,} bytes is below what a replica needs, {each:,}"
        )


def _read_accelerator(text: str) -> tuple[str, str]:
    """Kind and profile."""
    text = text.strip().lower()
    if text.startswith(_RESOURCE_PREFIX):
        text = f"{SLICE}:{text.removeprefix(_RESOURCE_PREFIX)}"
    kind, colon, profile = text.partition(":")
    if kind not in {ANY, WHOLE, SLICE} or (colon and kind != SLICE):
        raise WishError("accelerator", f"'{text}' is none of any, whole, slice, slice:3g.40gb")
    if colon and not _PROFILE.fullmatch(profile):
        raise WishError("accelerator", f"'{profile}' is no profile of a slice, such as 3g.40gb")
    return kind, profile


def _check_range(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise WishError(field, f"give a whole number from 0 to {most:,}")
