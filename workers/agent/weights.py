"""The agent's use of the weight store: what it is told to have, and what replicas start from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from workers.agent import redis_link
from workers.agent.config import AgentConfig
from workers.agent.home import Home, Identity
from workers.agent.journal import Journal, WeightsWish
from workers.protocol import manifest, v1
from workers.protocol.weights import WeightsReport, WeightsSource, WeightsWanted
from workers.protocol.wish import WantedState
from workers.weights.imports.desk import ImportDesk
from workers.weights.imports.places import open_lister
from workers.weights.imports.run import Places
from workers.weights.keeper import KeeperSettings, Verdict, WeightsKeeper
from workers.weights.planning import StorePolicy
from workers.weights.secrets import Secrets
from workers.weights.shelf import Shelf, key_of
from workers.weights.sources.opening import open_source
from workers.weights.swarm.serving import ServeLimits
from workers.weights.swarm_desk import SwarmDesk

logger = logging.getLogger(__name__)


class NodeWeights:
    """Weights on this node's disk."""

    def __init__(
        self,
        home: Home,
        identity: Identity,
        config: AgentConfig,
        journal: Journal,
        *,
        on_change: Callable[[], None],
        tell: Callable[[v1.ImportFindings], None],
    ) -> None:
        self._redis_url = identity.redis_url
        self._journal = journal
        secrets, local = Secrets(home.secrets), config.weights_local_sources
        shelf = Shelf(Path(config.weights_folder) if config.weights_folder else home.weight_store)
        self._keeper = WeightsKeeper(
            shelf,
            KeeperSettings(
                StorePolicy(
                    margin_bytes=config.weights_margin_bytes,
                    limit_bytes=config.weights_limit_bytes,
                    at_once=config.weights_at_once,
                ),
                streams=config.weights_streams,
                bytes_per_second=config.weights_bytes_per_second,
                scrub_bytes_per_second=config.weights_scrub_bytes_per_second,
            ),
            read_manifest=self._read_manifest,
            open_source=lambda told: open_source(told, secrets, allow_local=local),
            in_use=self._in_use,
            on_change=on_change,
            swarm=_swarm_desk(identity.node_id, config, shelf),
            open_imports=lambda cap, wake: ImportDesk(
                identity.node_id,
                shelf,
                Places(
                    open_lister=lambda order: open_lister(order, secrets, allow_local=local),
                    open_source=lambda order, location: open_source(
                        WeightsSource(kind=order.kind, location=location, secret=order.secret),
                        secrets,
                        allow_local=local,
                    ),
                    caps=(cap,),
                    streams=config.weights_streams,
                ),
                tell=tell,
                on_change=wake,
            ),
        )

    def start(self) -> None:
        """Go on with what was wanted when the agent last ran."""
        wish = self._journal.weights_wish()
        if wish is not None:
            self._keeper.take(wish.weights, wish.revision, wish.imports)
        self._keeper.start()

    def stop(self) -> None:
        """Stop fetching; what is verified stays, and the next agent goes on from there."""
        self._keeper.stop()

    def take(self, command: v1.ApplyWeights) -> str:
        """Have these weights from now on. Returns why not, or nothing."""
        before = self._journal.weights_wish()
        newest = (before.lease_epoch, before.revision) if before is not None else (0, 0)
        if (command.lease_epoch, command.revision) < newest:
            return ""  # it came late: a newer one is known
        try:
            for one in command.weights:
                key_of(one.revision)
        except ValueError as error:
            return str(error)
        wish = WeightsWish(
            revision=command.revision,
            lease_epoch=command.lease_epoch,
            weights=command.weights,
            imports=command.imports,
        )
        if wish != before:
            self._journal.save_weights_wish(wish)
        self._keeper.take(command.weights, command.revision, command.imports)
        return ""

    def wanted(self) -> tuple[WeightsWanted, ...]:
        """What is to be on this node's disk."""
        wish = self._journal.weights_wish()
        return wish.weights if wish is not None else ()

    def verdict(self, revision: str) -> Verdict:
        """Whether a replica can start from a revision now, and if not, why not."""
        return self._keeper.verdict(revision)

    def report(self) -> WeightsReport:
        """What is here and how it goes."""
        return self._keeper.report()

    def _in_use(self) -> frozenset[str]:
        """Revisions that replicas run from, or are about to."""
        wish = self._journal.wish()
        return frozenset(
            spec.model.digest
            for spec in (wish.specs if wish else ())
            if spec.model.manifest_digest and spec.wanted is not WantedState.STOP
        )

    def _read_manifest(self, digest: str) -> bytes | None:
        """Bytes of a manifest as the control plane laid them out; `None` while they are not to be had."""
        client = redis_link.connect(self._redis_url, lambda: None)
        try:
            found = client.get(manifest.key_of(digest))
        except (RedisError, OSError) as error:
            logger.info("manifest %s is not read: %s", digest[:19], type(error).__name__)
            return None
        finally:
            client.close()
        return found if isinstance(found, bytes) else None


def _swarm_desk(node_id: str, config: AgentConfig, shelf: Shelf) -> SwarmDesk | None:
    """What gives pieces to other nodes; `None` where that is off."""
    if not config.weights_peers:
        return None
    serves = ServeLimits(bytes_per_second=config.weights_give_bytes_per_second)
    port = config.weights_peer_port
    return SwarmDesk(node_id, config.address, shelf.ready_folder, port=port, serves=serves)
