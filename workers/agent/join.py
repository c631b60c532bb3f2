"""Joining a fleet: a one-time token against the node key."""

from __future__ import annotations

import ipaddress
import json
import logging
import platform
import random
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import urllib3

from workers.agent import AGENT_VERSION
from workers.agent.home import Home, Identity
from workers.protocol import v1
from workers.protocol.addresses import Outcome, assess_address

_PATH = "/api/v1/agent/join"
_CONNECT_SECONDS = 5.0
_READ_SECONDS = 15.0
_CREATED = 201
_WORTH_ANOTHER_TRY = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0
_SHOWN_CHARACTERS = 300

logger = logging.getLogger(__name__)


class JoinError(Exception):
    """Joining did not work; the text says why and holds no secret."""


class BusyError(JoinError):
    """The control plane cannot be reached or is busy: another try may work."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a node says of itself when it joins."""

    url: str
    address: str
    name: str = ""
    """Empty: the name from before, else the host's."""
    name_suffix: bool = False
    """Take a number behind the name where it is taken."""
    wait_seconds: float = 0.0
    """How long to go on trying while the control plane is away or busy."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane's answer."""

    node_id: str
    name: str
    node_key: str
    key_epoch: int
    redis_url: str

    def __repr__(self) -> str:
        return f"Welcome(node_id={self.node_id!r}, name={self.name!r})"


def check_url(url: str, *, insecure: bool) -> str:
    """Return the control plane's URL. Raises `JoinError` where the token would go in the clear."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise JoinError(f"{url!r} is no http(s) address")
    if parts.scheme == "http" and not insecure and not _is_loopback(parts.hostname):
        raise JoinError(
            f"{parts.hostname} is not this machine: use https (or --insecure on a trusted network)"
        )
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def choose_address(address: str, url: str, *, allow_local: bool = False) -> str:
    """Return the address to be reached by: the one given, else the one on the way to the control plane.

    Raises `JoinError` for an address that other hosts cannot use, such as loopback on a node of
    another machine's fleet.
    """
    verdict = assess_address(address, peer=_own_address_towards(url), allow_local=allow_local)
    if verdict.outcome is Outcome.REFUSE:
        raise JoinError(f"{verdict.reason} (--address; --allow-local-address if it is meant)")
    if verdict.reason:
        logger.info("event=address_chosen address=%s %s", verdict.address, verdict.reason)
    return verdict.address


def _own_address_towards(url: str) -> str:
    """The address that packets to there leave from; empty where there is no way. Sends nothing."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        family, _, _, _, there = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""


def join(home: Home, options: JoinOptions, *, token: str) -> Identity:
    """Trade the token for the node key and keep it. Raises `JoinError`.

    The node's id is made before the first try and stays, so a try that was cut off can be repeated.
    """
    before = home.ensure_identity()
    body = {
        "token": token,
        "node_id": before.node_id,
        "name": options.name or before.name or platform.node(),
        "name_suffix": options.name_suffix,
        "hostname": platform.node(),
        "address": options.address,
        "agent_version": AGENT_VERSION,
        "major": v1.MAJOR,
        "minor": v1.MINOR,
    }
    welcome = _ask_until(options.url + _PATH, body, options.wait_seconds)
    if welcome.node_id != before.node_id:
        raise JoinError("the control plane answered for another node")
    identity = Identity(
        node_id=welcome.node_id,
        name=welcome.name,
        address=options.address,
        node_key=welcome.node_key,
        key_epoch=welcome.key_epoch,
        redis_url=welcome.redis_url,
    )
    home.save_identity(identity)
    return identity


def _ask_until(url: str, body: dict[str, object], wait_seconds: float) -> Welcome:
    """Ask, and ask again while the control plane is away: a whole allocation comes at the same moment."""
    deadline = time.monotonic() + wait_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return _ask(url, body)
        except BusyError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            logger.info("event=join_again after=%s", error)
        time.sleep(min(left, pause * random.uniform(0.5, 1.5)))  # noqa: S311 - spreads tries, hides nothing
        pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)


def _ask(url: str, body: dict[str, object]) -> Welcome:
    timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS)
    with urllib3.PoolManager(timeout=timeout, retries=False) as pool:
        try:
            response = pool.request("POST", url, json=body, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise BusyError(f"cannot reach {url}: {type(error).__name__}") from None
    if response.status != _CREATED:
        refused = f"refused with status {response.status}: {_detail(response.data)}"
        raise BusyError(refused) if response.status in _WORTH_ANOTHER_TRY else JoinError(refused)
    try:
        welcome = msgspec.json.decode(response.data, type=Welcome)
        key = bytes.fromhex(welcome.node_key)
    except (msgspec.DecodeError, ValueError):
        raise JoinError("the control plane's answer cannot be read") from None
    if len(key) != 32:  # noqa: PLR2004 - the size that the key derivation makes
        raise JoinError("the control plane's answer holds no node key")
    return welcome


def _detail(data: bytes) -> str:
    """The server's own words, as far as they are fit for a terminal."""
    try:
        answer = json.loads(data)
    except ValueError:
        return "no reason given"
    detail = answer.get("detail", answer) if isinstance(answer, dict) else answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        detail = error.get("message", error)
    return "".join(c for c in str(detail)[:_SHOWN_CHARACTERS] if c.isprintable())
