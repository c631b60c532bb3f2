"""What makes two replicas able to use the same blocks: the shape of a block in memory."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

PAGE_BYTES = 4096
_SMALLEST_EXTENT_BLOCKS = 16
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_SCALE_BYTES = {"float8_e4m3fn": 2}
"""Beside each vector, behind all vectors of the block."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a block: `[layers, 2, block_tokens, kv_heads, head_size]` of one element type.

    The model is no part of it: nobody computes with another replica's blocks, so models of one shape,
    such as two fine-tunes, may draw on one pool.
    """

    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    block_tokens: int = 16
    kind: str = "cpu"
    """Memory that the blocks lie in: `cpu`, or the UUID of an accelerator."""
    page_bytes: int = PAGE_BYTES
    """What that memory is mapped by: 2 MiB on accelerators of today."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which lie in one piece."""
        vectors = 2 * self.layers * self.block_tokens * self.kv_heads
        return vectors * (self.head_size * _ELEMENT_BYTES[self.dtype] + _SCALE_BYTES.get(self.dtype, 0))

    @property
    def extent_blocks(self) -> int:
        """Blocks that are lent together: at least 16, and a whole number of pages."""
        step = self.page_bytes // math.gcd(self.page_bytes, self.block_bytes)
        return -(-_SMALLEST_EXTENT_BLOCKS // step) * step

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent, whole pages."""
        return self.extent_blocks * self.block_bytes

    @property
    def digest(self) -> bytes:
        """16 bytes that name the layout."""
        parts = (
            *(self.layers, self.kv_heads, self.head_size, self.dtype),
            *(self.block_tokens, self.kind, self.page_bytes),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    @property
    def pool_id(self) -> str:
        """Name of the node's pool of this layout: 32 hex digits."""
        return self.digest.hex()
