"""The composition root: builds adapters and hands them to the edges. Only entry points import it."""

from __future__ import annotations

import os
import socket
import time
from uuid import UUID

import redis
from django.conf import settings
from django.core.exceptions import ValidationError

from exaserve_ops.adapters.agentlink import CeleryAgentLink
from exaserve_ops.adapters.compiled_folder import CompiledFolder
from exaserve_ops.adapters.doorbell import PostgresDoorbell
from exaserve_ops.adapters.engine_probe import HttpEngineProbe
from exaserve_ops.adapters.gateway_reports import GatewayReportReader
from exaserve_ops.adapters.leadership import LeaderLease
from exaserve_ops.adapters.live_store import RedisLivePublisher, RedisLiveReader
from exaserve_ops.adapters.manifest_shelf import ManifestShelf
from exaserve_ops.adapters.model_findings import ModelFindings
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.model_readings import ModelReadings
from exaserve_ops.adapters.pulses import RedisPulseReader
from exaserve_ops.adapters.reach_table import ReachReader, place_token
from exaserve_ops.adapters.reports import RedisReportSource
from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.adapters.session_pins import RedisSessionPins
from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.adapters.ssh_credentials import CredentialVault
from exaserve_ops.adapters.ssh_site import SiteSettings, SshSites
from exaserve_ops.adapters.store_users import RedisStoreUsers, password_sha256
from exaserve_ops.adapters.swarm_board import RedisSwarmBoard
from exaserve_ops.adapters.turn_log import TurnLogReader
from exaserve_ops.api import ports as api_ports
from exaserve_ops.controllers.installations import InstallationPorts
from exaserve_ops.controllers.process import Adapters, Controllers
from exaserve_ops.controllers.store_users import StoreUserKeeper
from exaserve_ops.dashboard import ports as dashboard_ports
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.settings.env import Environment
from workers.protocol import digests

SOCKET_SECONDS = 5.0
KEY_EPOCH_SECONDS = 5.0
"""How long a revoked node key may still be believed."""


def connect_pages() -> None:
    """Hand pages and REST what they need from outside."""
    reader = RedisLiveReader(_environment().redis_url)
    private = _environment().private_folders
    folder = ModelReadings(ModelFolder(private=private))
    dashboard_ports.live_reader.use(reader)
    dashboard_ports.model_folder_reader.use(folder)
    api_ports.replica_loads.use(reader)
    api_ports.model_folder_reader.use(folder)
    compiled = CompiledFolder(_environment().compiled_folders, private=private)
    dashboard_ports.compiled_folder_reader.use(compiled)
    api_ports.compiled_folder_reader.use(compiled)
    gateways = GatewayReportReader(_client())
    dashboard_ports.gateway_reports.use(gateways)
    api_ports.gateway_reports.use(gateways)
    limits = _move_limits()
    dashboard_ports.move_limits.use(limits)
    api_ports.move_limits.use(limits)
    vault = _vault()
    dashboard_ports.credential_vault.use(vault)
    api_ports.credential_vault.use(vault)
    api_ports.store_users.use(RedisStoreUsers(_client()))


def build_controllers() -> Controllers:
    """Everything that `manage.py run_controllers` runs."""
    environment = _environment()
    consumer = f"{socket.gethostname()}-{os.getpid()}"
    keys = NodeKeys(environment.fleet_secret)
    return Controllers(
        Adapters(
            lead=LeaderLease(environment.database_url, consumer),
            reports=RedisReportSource(_client(), consumer, keys),
            pulses=RedisPulseReader(_client(), keys),
            link=CeleryAgentLink(settings.CELERY_BROKER_URL, keys, _client(), environment.fleet_secret),
            routes=RouteTableWriter(_client()),
            publisher=RedisLivePublisher(_client()),
            ingest_publisher=RedisLivePublisher(_client()),
            turns=TurnLogReader(_client(), consumer),
            pins=RedisSessionPins(
                environment.redis_url, ttl_seconds=environment.session_seconds or DEFAULT_TTL_SECONDS
            ),
            shelf=ManifestShelf(_client()),
            swarm_board=RedisSwarmBoard(_client()),
            findings=ModelFindings(),
            doorbell=PostgresDoorbell(environment.database_url),
            reach=ReachReader(_client()),
            place_token=place_token,
            installations=build_installation_ports(),
            store_users=build_store_user_keeper(),
            move_limits=_move_limits(),
            engine_probe=HttpEngineProbe(keys),
        )
    )


def build_store_user_keeper() -> StoreUserKeeper | None:
    """What keeps a user in Redis for each node; `None` where all nodes share one password."""
    environment = _environment()
    if not environment.redis_node_users:
        return None
    secret = environment.fleet_secret

    def password_of(node_id: str, key_epoch: int) -> str:
        return password_sha256(digests.node_key(secret, node_id, key_epoch))

    return StoreUserKeeper(RedisStoreUsers(_client()), password_of)


def build_installation_ports() -> InstallationPorts:
    """What puts agents on machines over SSH."""
    environment = _environment()
    site = SiteSettings(
        control_url=environment.public_url,
        redis_url=environment.agent_redis_url,
        tree=settings.BASE_DIR,
        wheelhouse=environment.wheelhouse,
        free_disk_bytes=environment.ssh_free_disk_bytes,
    )
    return InstallationPorts(SshSites(site, clock.now), _vault(), environment.ssh_max_connections)


class NodeKeys:
    """Derives node keys. Key epochs are looked up again now and then, so that a raised one revokes.

    All of them at once: a query for each of a thousand nodes would be most of what watching costs.
    """

    def __init__(self, fleet_secret: bytes) -> None:
        self._fleet_secret = fleet_secret
        self._keys: dict[str, tuple[int, bytes]] = {}
        self._epochs: dict[str, int] = {}
        self._read_at = -1e9

    def __call__(self, node_id: str) -> bytes | None:
        """Key of a node; `None` for one that is not recorded."""
        now = time.monotonic()
        if now - self._read_at >= KEY_EPOCH_SECONDS:
            # Before the query: other threads go on with what is known meanwhile.
            self._read_at = now
            rows = Node.objects.values_list("pk", "key_epoch")
            self._epochs = {str(pk): epoch for pk, epoch in rows}
        epoch = self._epochs.get(node_id) or self._look_up(node_id)
        if epoch is None:
            self._keys.pop(node_id, None)
            return None
        known = self._keys.get(node_id)
        if known is None or known[0] != epoch:
            known = self._keys[node_id] = (epoch, digests.node_key(self._fleet_secret, node_id, epoch))
        return known[1]

    def _look_up(self, node_id: str) -> int | None:
        """Epoch of a node that has only just joined."""
        try:
            epoch = Node.objects.filter(pk=UUID(node_id)).values_list("key_epoch", flat=True).first()
        except (ValueError, ValidationError):
            return None
        if epoch is not None:
            self._epochs[node_id] = epoch
        return epoch


def _move_limits() -> MoveLimits:
    environment = _environment()
    return MoveLimits(
        moves_per_node=environment.moves_per_node,
        moves_per_fleet=environment.moves_per_fleet,
        bytes_per_second=environment.move_bytes_per_second,
        fleet_bytes_per_second=environment.fleet_move_bytes_per_second,
    )


def _vault() -> CredentialVault:
    return CredentialVault(_client(), _environment().fleet_secret)


def _client() -> redis.Redis:
    url = _environment().redis_url
    # A Unix socket has no keepalive, and the client refuses to be told of one.
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return redis.Redis.from_url(
        url,
        socket_timeout=SOCKET_SECONDS,
        socket_connect_timeout=3,
        health_check_interval=10,
        **keepalive,
    )


def _environment() -> Environment:
    return settings.ENV
