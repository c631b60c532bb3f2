"""Commands to agents: sealed protocol messages on the node's own Celery queue."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Sequence

import redis
from celery import Celery

from exaserve_ops.serving.domain.accelerator_wish import MpsShare
from exaserve_ops.serving.domain.kv_pools import LimitsWish
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.sessions.domain.moves import MoveOrder
from exaserve_ops.weights.domain.wanted import SwarmPart, WantedImport, WantedWeights
from workers.protocol import digests, names, v1
from workers.protocol.engines.session_moves import WARM_PREFILL
from workers.protocol.imports import WeightsImport
from workers.protocol.weights import SwarmOrder, SwarmParent, WeightsSource, WeightsWanted
from workers.protocol.wish import GangMember, ModelFile, ModelRef, MpsLimits, ReplicaSpec, WantedState

COMMAND_SECONDS = 60.0
"""How long a command is worth taking in; the wish is sent again long before that is a loss."""

SWARM_KEY_SECONDS = 7200.0
"""A key outlives its epoch, so that a control plane that is away for a while stops no swarm."""

QUEUE_MESSAGES = 64
"""Commands kept for a node whose agent takes none in."""

NodeKeySource = Callable[[str], bytes | None]
"""Key of a node by its id; `None` for a node that nobody knows."""


class CeleryAgentLink:
    """Sends to agents by task name; nothing of the agents' code is imported."""

    def __init__(
        self, broker_url: str, node_key_of: NodeKeySource, client: redis.Redis, fleet_secret: bytes
    ) -> None:
        self._node_key_of = node_key_of
        self._redis = client
        self._fleet_secret = fleet_secret
        self._celery = Celery("exaops-agentlink", broker=broker_url, set_as_current=False)
        self._celery.conf.update(
            task_ignore_result=True,
            broker_transport_options={
                "socket_timeout": 5,
                "socket_connect_timeout": 3,
                "socket_keepalive": True,
                "health_check_interval": 10,
            },
            # A broker that is away is the caller's news at once, not a thread that waits for it.
            task_publish_retry=False,
        )

    def send_wish(
        self, node_id: str, *, lease_epoch: int, revision: int, replicas: Sequence[WantedReplica]
    ) -> None:
        """Send the whole wish of a node."""
        command = v1.ApplyDesired(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            revision=revision,
            replicas=tuple(_spec(replica, self._gang_member(replica)) for replica in replicas),
        )
        self._send(node_id, command)

    def send_weights(
        self,
        node_id: str,
        *,
        lease_epoch: int,
        revision: int,
        weights: Sequence[WantedWeights],
        imports: Sequence[WantedImport],
    ) -> None:
        """Send all that a node is to have on its disk, and the models that it takes in."""
        command = v1.ApplyWeights(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            revision=revision,
            weights=tuple(self._weights(wanted) for wanted in weights),
            imports=tuple(_import(wanted) for wanted in imports),
        )
        self._send(node_id, command)

    def request_hello(self, node_id: str, *, lease_epoch: int, reason: str) -> None:
        """Ask an agent to introduce itself again."""
        command = v1.RequestHello(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            reason=reason,
        )
        self._send(node_id, command)

    def tail_log(self, node_id: str, *, lease_epoch: int, replica_id: str, seconds: float) -> None:
        """Ask for a replica's log for a while."""
        command = v1.TailLog(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=seconds,
            replica_id=replica_id,
            seconds=seconds,
        )
        self._send(node_id, command)

    def end_process(
        self, node_id: str, *, lease_epoch: int, command_id: str, pid: int, start_ticks: int
    ) -> None:
        """Ask an agent to end a process that it left behind."""
        command = v1.EndProcess(
            command_id=command_id,
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            pid=pid,
            start_ticks=start_ticks,
        )
        self._send(node_id, command)

    def set_kv_limits(self, wish: LimitsWish, *, lease_epoch: int, command_id: str) -> None:
        """Ask an agent for other limits of a replica in its KV pool."""
        command = v1.SetKvLimits(
            command_id=command_id,
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            replica_id=wish.replica_id,
            minimum_blocks=wish.minimum_blocks,
            ceiling_blocks=wish.ceiling_blocks,
        )
        self._send(wish.node_id, command)

    def move_session(self, order: MoveOrder, *, lease_epoch: int, command_id: str) -> None:
        """Have a replica send a session's KV to another one; its agent answers when that is over."""
        key = self._node_key_of(order.target_node_id)
        if key is None:
            return  # the target's node is gone: the order ends by its deadline
        engine_key = digests.engine_api_key(key, order.target_id, order.target_attempt)
        command = v1.MoveSession(
            command_id=command_id,
            lease_epoch=lease_epoch,
            deadline_seconds=order.seconds,
            replica_id=order.source_id,
            attempt=order.source_attempt,
            session_id=order.session_id,
            transfer_id=order.transfer_id.hex(),
            transfer_key=digests.transfer_key(engine_key, order.transfer_id).hex(),
            target=f"http://{order.target_address}",
            bytes_per_second=order.bytes_per_second,
            way=WARM_PREFILL if order.computes else "",
        )
        self._send(order.source_node_id, command)

    def let_session_go(self, order: MoveOrder, *, lease_epoch: int) -> None:
        """Say to the source that the session lives elsewhere: its blocks go first."""
        command = v1.LetSessionGo(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            replica_id=order.source_id,
            attempt=order.source_attempt,
            session_id=order.session_id,
        )
        self._send(order.source_node_id, command)

    def forget(self, node_id: str, *, lease_epoch: int, replica_ids: Sequence[str]) -> None:
        """Say that the end of these replicas is recorded."""
        command = v1.ForgetReplica(
            command_id=_new_id(),
            lease_epoch=lease_epoch,
            deadline_seconds=COMMAND_SECONDS,
            replica_ids=tuple(replica_ids),
        )
        self._send(node_id, command)

    def _weights(self, wanted: WantedWeights) -> WeightsWanted:
        revision = wanted.revision
        return WeightsWanted(
            revision=revision.digest,
            manifest_digest=revision.manifest_digest,
            total_bytes=revision.total_bytes,
            name=revision.name,
            sources=tuple(
                WeightsSource(kind=origin.kind, location=origin.location, secret=origin.secret)
                for origin in revision.origins
            ),
            paused=wanted.paused,
            bytes_per_second=float(wanted.bytes_per_second),
            priority=wanted.priority,
            swarm=self._swarm(revision.manifest_digest, wanted.swarm),
            engine_cache=revision.engine_cache,
        )

    def _swarm(self, manifest_digest: str, part: SwarmPart | None) -> SwarmOrder | None:
        if part is None:
            return None
        key = digests.swarm_key(self._fleet_secret, manifest_digest, part.key_epoch)
        return SwarmOrder(
            epoch=part.key_epoch,
            key=key.hex(),
            valid_seconds=SWARM_KEY_SECONDS,
            stripes=tuple(
                tuple(SwarmParent(node_id=p.node_id, host=p.host, port=p.port) for p in parents)
                for parents in part.stripes
            ),
        )

    def _gang_member(self, wanted: WantedReplica) -> GangMember | None:
        member = wanted.member
        if member is None:
            return None
        return GangMember(
            number=member.number,
            count=member.count,
            epoch=member.epoch,
            head_address=member.head_address,
            rendezvous=member.rendezvous,
            hosts=member.hosts,
            adapters=member.adapters,
            key=digests.gang_key(self._fleet_secret, wanted.replica_id, member.epoch),
        )

    def _send(self, node_id: str, command: v1.Command) -> None:
        key = self._node_key_of(node_id)
        if key is None:
            return
        message = v1.encode_command(command, node_id=node_id, node_key=key)
        queue = names.node_queue(node_id)
        self._celery.send_task(
            names.COMMAND_TASK,
            args=[base64.b64encode(message).decode()],
            queue=queue,
            task_id=command.command_id,
            # No `expires`: it would be judged by the node's wall clock, which may be off.
            # Nobody may read a command off a task's description in a log.
            argsrepr="(sealed)",
        )
        # An agent whose intake stands still must not fill the store: every wish is whole, so the
        # newest few are worth all. The transport pushes at the head and takes from the tail.
        self._redis.ltrim(queue, 0, QUEUE_MESSAGES - 1)


def _new_id() -> str:
    return str(uuid.uuid4())


def _spec(wanted: WantedReplica, member: GangMember | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=wanted.replica_id,
        deployment=wanted.deployment,
        generation=wanted.generation,
        wanted=WantedState(wanted.wanted),
        model=ModelRef(
            name=wanted.model_name,
            digest=wanted.model_digest,
            source=wanted.model_source,
            files=tuple(
                ModelFile(path=path, size_bytes=size, sha256=digest)
                for path, size, digest in wanted.model_files
            ),
            manifest_digest=wanted.manifest_digest,
        ),
        engine=wanted.engine,
        engine_options=wanted.engine_options,
        accelerator_uuids=wanted.accelerator_uuids,
        memory_bytes=wanted.memory_bytes,
        drain_seconds=wanted.drain_seconds,
        start_seconds=wanted.start_seconds,
        stall_seconds=wanted.stall_seconds,
        mps=_mps_limits(wanted.mps),
        member=member,
        asleep=wanted.asleep,
    )


def _mps_limits(share: MpsShare | None) -> MpsLimits | None:
    if share is None:
        return None
    return MpsLimits(thread_percent=share.thread_percent, memory_bytes=share.memory_bytes)


def _import(wanted: WantedImport) -> WeightsImport:
    return WeightsImport(
        import_id=wanted.import_id,
        kind=wanted.origin.kind,
        location=wanted.origin.location,
        secret=wanted.origin.secret,
        revision=wanted.revision,
        files=wanted.files,
        attempt=wanted.attempt,
        paused=wanted.paused,
        name=wanted.name,
    )
