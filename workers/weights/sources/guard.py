"""Connections that go to no address which only means something to the node itself.

Who may name a place for weights must not make nodes ask their own services, or the metadata service of their
cloud, which hands out credentials. Names are resolved anew for each connection and servers redirect, so what
counts is the address that a connection really has; it is looked at before anything is sent.
"""

from __future__ import annotations

import ipaddress
from socket import socket

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Retry, Timeout

from workers.protocol.addresses import is_reserved_for_host

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 10.0
"""Without a byte for so long, a server counts as hung."""
_CONNECTIONS = 16


class ForbiddenPlaceError(Exception):
    """A connection led to an address that weights do not come from.

    No `OSError`, which the HTTP library would wrap and try again.
    """


class _GuardedConnection(HTTPConnection):
    def _new_conn(self) -> socket:
        return _checked(super()._new_conn(), allow_loopback=False)


class _GuardedTlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket:
        return _checked(super()._new_conn(), allow_loopback=False)


class _LocalConnection(HTTPConnection):
    def _new_conn(self) -> socket:
        return _checked(super()._new_conn(), allow_loopback=True)


class _LocalTlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket:
        return _checked(super()._new_conn(), allow_loopback=True)


class _GuardedPool(HTTPConnectionPool):
    ConnectionCls = _GuardedConnection


class _GuardedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _GuardedTlsConnection


class _LocalPool(HTTPConnectionPool):
    ConnectionCls = _LocalConnection


class _LocalTlsPool(HTTPSConnectionPool):
    ConnectionCls = _LocalTlsConnection


def pool_manager(*, redirects: int, allow_local: bool) -> urllib3.PoolManager:
    """Connections of one source; they raise `ForbiddenPlaceError`.

    `allow_local`: the node itself may be asked; its cable and its cloud's metadata service never are.
    """
    manager = urllib3.PoolManager(
        maxsize=_CONNECTIONS,
        block=False,
        timeout=Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
        # A hub sends on to where its files lie; the token is not sent along to another host.
        retries=Retry(
            total=redirects,
            connect=0,
            read=0,
            redirect=redirects,
            status=0,
            other=0,
            respect_retry_after_header=False,  # whoever fetches waits, and says so
        ),
    )
    manager.pool_classes_by_scheme = (
        {"http": _LocalPool, "https": _LocalTlsPool}
        if allow_local
        else {"http": _GuardedPool, "https": _GuardedTlsPool}
    )
    return manager


def _checked(connection: socket, *, allow_loopback: bool) -> socket:
    try:
        address = str(connection.getpeername()[0]).partition("%")[0]
    except OSError:
        return connection  # gone already: whoever uses it finds out
    ip = ipaddress.ip_address(address)
    if is_reserved_for_host(ip, allow_loopback=allow_loopback):
        connection.close()
        raise ForbiddenPlaceError(
            f"it leads to {address}, which is the node itself; set weights_local_sources in the agent's "
            "settings if weights are to come from there"
            if not is_reserved_for_host(ip, allow_loopback=True)
            else f"it leads to {address}, of the node's cable or its cloud; weights never come from there"
        )
    return connection
