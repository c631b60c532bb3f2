"""Matrix multiplications with fixed weights, laid out for the device they run on.

On a CPU, oneDNN multiplies a weight that it has packed beforehand two to three times as fast as torch's
own `linear` does a plain one, from one row to hundreds, in float32 and in bfloat16 alike. A packed
weight is a copy in memory of this process, so a weight that several processes share stays plain; oneDNN
then still beats `linear` in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_ONEDNN = torch.ops.mkldnn
"""What torch's compiler calls for a frozen `linear`; the underscores are part of the operators' names."""

_HAS_ONEDNN: bool = torch._C._has_mkldnn  # noqa: SLF001 - what torch.backends.mkldnn reads, untyped


class Linear:
    """`rows @ weight.T + bias` for one weight `[outputs, inputs]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool) -> None:
        """Take a weight over; `pack` allows a copy in another layout, after which `weight` may go."""
        self._bias = bias
        self._weight = weight
        self._apply: Callable[[Tensor], Tensor] = self._plain
        if onednn_multiplies(weight):
            self._apply = self._onednn
            if pack:
                self._weight = _ONEDNN._reorder_linear_weight(weight, None)  # noqa: SLF001 - see there

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply `[rows, inputs]` to `[rows, outputs]`."""
        return self._apply(rows)

    def _plain(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)

    def _onednn(self, rows: Tensor) -> Tensor:
        result: Tensor = _ONEDNN._linear_pointwise(rows, self._weight, self._bias, "none", [], "")  # noqa: SLF001 - see there
        return result


def onednn_multiplies(weight: Tensor) -> bool:
    """Whether this machine's oneDNN takes such a weight."""
    if weight.device.type != "cpu" or not _HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_ONEDNN._is_mkldnn_bf16_supported())  # noqa: SLF001 - see there
    return weight.dtype == torch.float32
