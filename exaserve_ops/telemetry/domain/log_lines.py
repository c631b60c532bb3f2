"""Lines of logs that come twice: whoever is asked anew for a log begins with its newest lines."""

from __future__ import annotations

from collections.abc import Sequence

_COMPARED_CHARACTERS = 1000
"""Of each line: the end of a long one may have been cut in another way."""


def untold(kept: Sequence[str], newest: Sequence[str]) -> tuple[str, ...]:
    """Those of the newest lines that come after what is kept, which ends somewhere among them.

    All of them where it does not: then more was written meanwhile than they hold.
    """
    before = [line[:_COMPARED_CHARACTERS] for line in kept[-len(newest) :]]
    after = [line[:_COMPARED_CHARACTERS] for line in newest]
    for count in range(min(len(before), len(after)), 0, -1):
        if before[-count:] == after[:count]:
            return tuple(newest[count:])
    return tuple(newest)
