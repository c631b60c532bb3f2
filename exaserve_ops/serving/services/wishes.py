"""Revisions of what nodes are told to run."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db import transaction

from exaserve_ops.serving.models import NodeWish


@dataclass(frozen=True, slots=True)
class WishRevision:
    """The revision of a node's wish, and whether it is new."""

    revision: int
    changed: bool


@transaction.atomic
def record_wish(node_id: UUID, *, content_sha256: str) -> WishRevision:
    """Return the revision that stands for this content; other content than before is a new one."""
    wish, _ = NodeWish.objects.select_for_update().get_or_create(node_id=node_id)
    if wish.content_sha256 == content_sha256:
        return WishRevision(wish.revision, changed=False)
    wish.revision += 1
    wish.content_sha256 = content_sha256
    wish.save(update_fields=["revision", "content_sha256"])
    return WishRevision(wish.revision, changed=True)
