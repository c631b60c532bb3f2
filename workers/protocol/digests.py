"""What both sides must compute alike: keys, seals, and the hash chain of KV blocks.

Keys form a tree, so that no secret has to be stored per node or sent per replica::

    fleet secret ── node key (given to the node once, when it joins) ─┬─ report key, command key
                 │                                                    ├─ password in Redis
                 │                                                    └─ engine key of each attempt
                 ├── key of each swarm of weights (told to its nodes, for an hour or two)
                 └── key of each start of a replica over several nodes (told to its members)

Whoever holds the fleet secret (controllers, gateway) can derive every key; a node can derive only
its own. Raising a node's `key_epoch` revokes all of them at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

KV_BLOCK_TOKENS = 16
"""Tokens in one KV block; the unit of paging and of prefix matching."""

_SEAL_BYTES = 16
_BLOCK_HASH_BYTES = 16


def node_key(fleet_secret: bytes, node_id: str, key_epoch: int) -> bytes:
    """32-byte key of one node, for one key epoch."""
    return _derive(fleet_secret, f"node:{node_id}:{key_epoch}")


def report_key(key: bytes) -> bytes:
    """Key that seals what a node reports, from its node key."""
    return _derive(key, "report")


def command_key(key: bytes) -> bytes:
    """Key that seals what a node is told, from its node key."""
    return _derive(key, "command")


def store_password(key: bytes) -> str:
    """Password of a node's own user in Redis, from its node key."""
    return "xr-" + _derive(key, "store").hex()[:48]


def engine_api_key(key: bytes, replica_id: str, attempt: int) -> str:
    """Bearer token that the engine of one attempt demands, from the node key."""
    return "xe-" + _derive(key, f"engine:{replica_id}:{attempt}").hex()[:48]


def transfer_key(engine_key: str, transfer_id: bytes) -> bytes:
    """32-byte key of one transfer of KV blocks to an engine, from that engine's bearer token."""
    return _derive(engine_key.encode()[:64], f"transfer:{transfer_id.hex()}")


def swarm_key(fleet_secret: bytes, manifest_digest: str, epoch: int) -> bytes:
    """32-byte key that nodes of one swarm sign requests for pieces with, for one epoch."""
    return _derive(fleet_secret, f"swarm:{manifest_digest}:{epoch}")


def gang_key(fleet_secret: bytes, replica_id: str, epoch: int) -> str:
    """What members of one start of a replica over several nodes know one another by."""
    return "xg-" + _derive(fleet_secret, f"gang:{replica_id}:{epoch}").hex()[:48]


def seal(key: bytes, node_id: str, body: bytes) -> bytes:
    """16-byte keyed BLAKE2b over the addressee and the body of a message."""
    digest = hashlib.blake2b(digest_size=_SEAL_BYTES, key=key)
    digest.update(node_id.encode())
    digest.update(b"\0")
    digest.update(body)
    return digest.digest()


def block_hash_chain(
    tokens: Sequence[int], *, salt: bytes = b"", block_tokens: int = KV_BLOCK_TOKENS
) -> list[bytes]:
    """Hash of each full block of a token sequence, each one covering all blocks before it.

    Returns `len(tokens) // block_tokens` digests of 16 bytes; equal chains mean equal prefixes. The
    `salt` keeps models (and, where wanted, tenants) apart. Tokens are hashed as little-endian
    unsigned 32-bit integers.
    """
    chain: list[bytes] = []
    parent = hashlib.blake2b(salt, digest_size=_BLOCK_HASH_BYTES).digest()
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        digest = hashlib.blake2b(parent, digest_size=_BLOCK_HASH_BYTES)
        for token in tokens[start : start + block_tokens]:
            digest.update(token.to_bytes(4, "little"))
        parent = digest.digest()
        chain.append(parent)
    return chain


def _derive(key: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=32, person=b"exaserve-ops").digest()
