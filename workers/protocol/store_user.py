"""The user that a node is in Redis: its name, its password, and all that it may do there.

Both sides derive the password from the node key, so it is stored nowhere but in the node's own
identity, and the control plane can make every user again after Redis lost them. Raising a node's
`key_epoch` changes the password with all its other keys.

A compromised node reaches what its agent reaches: it can append reports (which are sealed), write its
own pulse, take or add commands of its own queue (which are sealed as well), and read the manifests of
weights. Reports, sessions,
routes and the commands of others stay closed to it.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from workers.protocol import digests, manifest, names, pulse

PREFIX = "exaops-node-"
"""Begins the name of every user that the control plane makes; others are none of its business."""

_CREDENTIALS = frozenset({"username", "password"})


def user_of(node_id: str) -> str:
    """Name of a node's user."""
    return PREFIX + node_id


def node_of(user: str) -> str | None:
    """Node id behind a user's name; `None` for a user that is no node's."""
    return user.removeprefix(PREFIX) if user.startswith(PREFIX) else None


def rights_of(node_id: str) -> tuple[str, ...]:
    """Rules for `ACL SETUSER` after `reset`: what an agent does, each command on its own key only.

    The selectors in parentheses keep commands apart: with one set of commands for one set of keys, a
    node could overwrite the stream of all reports with the SET that it needs for its pulse.
    """
    return (
        *("+ping", "+select", "+client|setinfo", "+client|setname"),
        f"(+xadd %W~{names.REPORT_STREAM})",
        f"(+set %W~{pulse.key_of(node_id)})",
        # Taking commands, and putting one back that was taken when the connection broke.
        f"(+brpop +lpush ~{names.node_queue(node_id)})",
        # Manifests of weights hold no secret, and are checked by the digest that a sealed command names.
        f"(+get %R~{manifest.key_of('*')})",
    )


def url_for(url: str, node_id: str, node_key: bytes) -> str:
    """The address with the node's own user and password in place of whatever stands there."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    # A Unix socket's password may stand in the query as well.
    query = urlencode([item for item in parse_qsl(parts.query) if item[0] not in _CREDENTIALS])
    credentials = f"{user_of(node_id)}:{digests.store_password(node_key)}"
    return urlunsplit((parts.scheme, f"{credentials}@{place}", parts.path, query, ""))


def is_own(url: str, node_id: str) -> bool:
    """Whether an address carries this node's user, and not a password that many share."""
    return urlsplit(url).username == user_of(node_id)
