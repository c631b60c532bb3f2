"""The Celery app of a node: it takes commands in and hands them to the agent, nothing else.

Runs as a child process of the agent, so that a consumer that hangs on a dead connection can be
killed and started again without touching anything else. Knows no Django.
"""

from __future__ import annotations

import base64
import binascii
import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init
from kombu.entity import Queue

from workers.agent import redis_link
from workers.agent.home import Home
from workers.agent.intake_wire import ENV_AGENT_PID, ENV_HOME, send_command
from workers.protocol import names

_PARENT_CHECK_SECONDS = 1.0


def build_app(home: Home | None) -> Celery:
    """Make the app; without a home it has no broker and can only be imported."""
    app = Celery("workers.agent", set_as_current=False)
    app.conf.update(
        enable_utc=True,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,  # its reply queues stay in Redis for ever
        worker_send_task_events=False,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        task_ignore_result=True,
        task_acks_late=True,
        broker_connection_retry_on_startup=True,
        broker_connection_retry=True,
        broker_connection_max_retries=None,
        broker_pool_limit=1,
    )
    if home is not None:
        identity = home.load_identity()
        queue = names.node_queue(identity.node_id)
        app.conf.update(
            broker_url=redis_link.kombu_url(identity.redis_url),
            broker_transport_options=redis_link.kombu_options(identity.redis_url),
            broker_use_ssl=redis_link.kombu_ssl(identity.redis_url),
            task_default_queue=queue,
            # Commands come straight to the queue: no table of bindings is needed, nor may a node write one.
            task_queues=[_queue(queue)],
        )
    return app


def _queue(name: str) -> Any:  # noqa: ANN401 - kombu has no types
    return Queue(name, no_declare=True)  # type: ignore[no-untyped-call]  # kombu has no types


def _home_from_environment() -> Home | None:
    path = os.environ.get(ENV_HOME)
    return Home(Path(path)) if path else None


app = build_app(_home_from_environment())


@app.task(name=names.COMMAND_TASK, ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
def command(text: str) -> None:
    """Pass one sealed command, as base64 text, to the agent; what it says goes to the reports."""
    home = _home_from_environment()
    if home is None:
        return
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""  # the agent answers it as malformed and counts it
    send_command(home, data)


@worker_init.connect  # type: ignore[untyped-decorator]  # Celery has no types
def _end_with_the_agent(**_: Any) -> None:  # noqa: ANN401 - the signal's own arguments
    """Without its agent this process must not go on taking commands off the queue."""
    agent = int(os.environ.get(ENV_AGENT_PID) or os.getppid())

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
