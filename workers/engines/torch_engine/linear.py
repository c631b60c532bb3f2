"""Matrix multiplications with fixed weights, in the way that is fastest for how the weight lies."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from workers.engines.torch_engine.packing import PackedWeight, multiply, onednn_multiplies


class Linear:
    """`rows @ weight.T + bias` for one weight `[outputs, inputs]`.

    A packed weight is fastest by far; for a plain one in float32, oneDNN still beats `linear`.
    """

    def __init__(self, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> None:
        """Bind a weight, which stays as it is."""
        self._kept = weight
        self._weight = weight.tensor if isinstance(weight, PackedWeight) else weight
        self._bias = bias
        by_onednn = isinstance(weight, PackedWeight) or onednn_multiplies(weight)
        self._multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
            multiply if by_onednn else functional.linear
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply `[rows, inputs]` to `[rows, outputs]`."""
        return self._multiply(rows, self._weight, self._bias)
