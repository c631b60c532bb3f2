"""Names that both sides use: queues, streams, environment variables."""

from __future__ import annotations

REPORT_STREAM = "exaops:reports"
"""Redis stream that agents append sealed reports to, field `m`."""

REPORT_STREAM_MAX_LENGTH = 20_000
"""Approximate cap; heartbeats repeat the whole state, so what is trimmed is never the only copy."""

COMMAND_TASK = "exaops.agent.command"
"""Celery task by which a sealed command reaches an agent; its one argument is base64 text."""

ENV_REPLICA = "EXAOPS_REPLICA_ID"
ENV_ATTEMPT = "EXAOPS_REPLICA_ATTEMPT"
ENV_NODE = "EXAOPS_NODE_ID"
"""Launch label: these stand in the environment of every process that an agent launches."""

ENV_ENGINE_API_KEY = "EXAOPS_ENGINE_API_KEY"
"""How an engine of ours learns the bearer token that it must demand; never on a command line."""

ENV_GANG_KEY = "EXAOPS_GANG_KEY"
"""How an engine of ours learns what members of a replica over several nodes know one another by."""


def node_queue(node_id: str) -> str:
    """Celery queue of one node."""
    return f"node.{node_id}"
