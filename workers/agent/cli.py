"""Command line of the agent."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path

from workers.agent import processes
from workers.agent.agent import Agent
from workers.agent.allocation import NoTaskError, Task, task_of
from workers.agent.config import ConfigError, load_config
from workers.agent.credential import LinkFile, take_own_user
from workers.agent.engines import find_engines
from workers.agent.home import Home, HomeError, HomeLock, Identity
from workers.agent.join import JoinError, JoinOptions, check_url, choose_address, join
from workers.agent.journal import AttemptRow, Journal
from workers.agent.stopping import stop_replicas
from workers.kv.pool import NodePools, pools_folder
from workers.protocol import store_user

ENV_TOKEN = "EXAOPS_JOIN_TOKEN"  # noqa: S105 - the variable's name, not a token
_FAILED = 1
_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    commands = {
        "join": _join,
        "run": _run,
        "up": _up,
        "stop-replicas": _stop_replicas,
        "status": _status,
    }
    try:
        home = Home(_home_folder(options))
        return commands[options.command](home, options)
    except (ConfigError, NoTaskError) as error:
        _complain(error)
        return _USAGE
    except (HomeError, JoinError) as error:
        _complain(error)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.agent", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    joining = commands.add_parser("join", help=f"join a fleet; the token comes in {ENV_TOKEN}")
    up = commands.add_parser("up", help="join where that is still to be done, then run")
    _add_join_options(joining, "--url", wait_seconds=0.0)
    _add_join_options(up, "--join-url", wait_seconds=60.0)
    running = commands.add_parser("run", help="run the agent in the foreground")
    stopping = commands.add_parser("stop-replicas", help="end all replicas; the agent must not run")
    status = commands.add_parser("status", help="show what the journal knows, as JSON")
    for command in (running, up, stopping):
        command.add_argument("--config", type=Path, help="TOML file with settings")
    for command in (joining, running, up, stopping, status):
        command.add_argument("--home", required=True, help="the agent's folder")
        command.add_argument(
            "--per-task",
            action="store_true",
            help="under srun or mpiexec: a home and a name for each task, by host and local rank",
        )
    return parser


def _add_join_options(command: argparse.ArgumentParser, url: str, *, wait_seconds: float) -> None:
    command.add_argument(url, dest="url", required=True, help="address of the control plane")
    command.add_argument("--name", default="", help="name of this node; default: the host's name")
    command.add_argument(
        "--name-suffix", action="store_true", help="add a number where the name is taken, instead of ending"
    )
    command.add_argument(
        "--address",
        default="",
        help="where its replicas are reached; default: this host's address on the way to the control plane",
    )
    command.add_argument(
        "--allow-local-address", action="store_true", help="accept a loopback or link-local address"
    )
    command.add_argument("--token-file", type=Path, help=f"file with the token, instead of {ENV_TOKEN}")
    command.add_argument("--insecure", action="store_true", help="allow plain http to another machine")
    command.add_argument(
        "--wait-seconds",
        type=float,
        default=wait_seconds,
        help="go on trying so long while the control plane is away or busy (default: %(default)g)",
    )


def _task(options: argparse.Namespace) -> Task | None:
    return task_of(os.environ) if options.per_task else None


def _home_folder(options: argparse.Namespace) -> Path:
    base = Path(options.home).resolve()
    task = _task(options)
    return task.home(base) if task else base


def _join(home: Home, options: argparse.Namespace) -> int:
    url = check_url(options.url, insecure=options.insecure)
    task = _task(options)
    wish = JoinOptions(
        url=url,
        address=choose_address(options.address, url, allow_local=options.allow_local_address),
        name=task.name(options.name) if task else options.name,
        name_suffix=options.name_suffix,
        wait_seconds=options.wait_seconds,
    )
    identity = join(home, wish, token=_token(options))
    _say({"node_id": identity.node_id, "name": identity.name})
    return 0


def _up(home: Home, options: argparse.Namespace) -> int:
    if not home.identity_file.exists() or not home.load_identity().joined:
        _join(home, options)
    # Nothing that runs from here on has a use for it.
    os.environ.pop(ENV_TOKEN, None)
    return _run(home, options)


def _token(options: argparse.Namespace) -> str:
    if options.token_file is not None:
        try:
            token = options.token_file.read_text().strip()
        except OSError as error:
            raise JoinError(f"cannot read {options.token_file}: {error.strerror}") from None
    else:
        token = os.environ.get(ENV_TOKEN, "").strip()
    if not token:
        raise JoinError(f"no token: set {ENV_TOKEN} or give --token-file")
    return str(token)


def _run(home: Home, options: argparse.Namespace) -> int:
    config = load_config(options.config, os.environ)
    if home.load_identity().joined:
        take_own_user(home)
    agent = Agent(home, config, engines=find_engines(config))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    return 0


def _stop_replicas(home: Home, options: argparse.Namespace) -> int:
    config = load_config(options.config, os.environ)
    identity = home.load_identity()
    home.create()
    lock = HomeLock(home)
    lock.acquire()
    journal = Journal(home.journal_file)
    left = stop_replicas(identity.node_id, journal, grace_seconds=config.stop_grace_seconds)
    journal.close()
    lock.release()
    if left:
        _complain(f"still there: pid {', '.join(map(str, left))}")
        return _FAILED
    NodePools(pools_folder(identity.node_id, home.root)).remove_all()  # no replica is left that uses one
    return 0


def _status(home: Home, _options: argparse.Namespace) -> int:
    identity = home.load_identity()
    journal = Journal(home.journal_file)
    wish = journal.wish()
    agent_pid = _agent_pid(home)
    _say(
        {
            "node_id": identity.node_id,
            "name": identity.name,
            "joined": identity.joined,
            "agent_pid": agent_pid,
            "redis": _redis_status(home, identity, runs=agent_pid is not None),
            "revision": wish.revision if wish else None,
            "lease_epoch": wish.lease_epoch if wish else None,
            "attempts": [_attempt_status(row) for row in journal.attempts()],
        }
    )
    journal.close()
    return 0


def _redis_status(home: Home, identity: Identity, *, runs: bool) -> dict[str, object]:
    """How the running agent fares with Redis; without one nobody can say."""
    link = LinkFile(home).read() if runs else None
    return {
        "user": "own" if store_user.is_own(identity.redis_url, identity.node_id) else "shared",
        "state": link.state if link else "unknown",
        "detail": link.detail if link else "",
    }


def _attempt_status(row: AttemptRow) -> dict[str, object]:
    leader = row.leader
    return {
        "replica_id": row.replica_id,
        "attempt": row.attempt,
        "generation": row.generation,
        "pid": processes.read_engine_pid(Path(row.runtime_dir)),
        "shim_pid": row.pid,
        "alive": leader is not None and processes.is_alive(leader),
        "address": f"{row.host}:{row.ports[0]}" if row.ports else "",
        "log": row.log_file,
    }


def _agent_pid(home: Home) -> int | None:
    """Pid of the agent that holds the home's lock, if one does."""
    lock = HomeLock(home)
    try:
        lock.acquire()
    except HomeError:
        return int(home.lock_file.read_text() or 0) or None
    lock.release()
    return None


def _say(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")


def _complain(text: object) -> None:
    sys.stderr.write(f"agent: {text}\n")
