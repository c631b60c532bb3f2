"""One SSH connection: the server proves itself first, then we do; every wait has an end.

Nothing here adds a host key. A connection without a pinned key can fetch the offered one, to be shown
to a person, and can do nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import paramiko

from exaserve_ops.adapters.ssh_credentials import read_private_key
from exaserve_ops.inventory.domain.installation import (
    Credentials,
    HostKey,
    StepFailedError,
    Target,
    judge_pins,
)

CONNECT_SECONDS = 10.0
BANNER_SECONDS = 15.0
HANDSHAKE_SECONDS = 20.0
AUTH_SECONDS = 20.0
CHANNEL_SECONDS = 15.0
KEEPALIVE_SECONDS = 10
BANNER_TRIES = 4
"""A server that is busy with other beginners (`MaxStartups`) drops some: they come again, spread out."""
BANNER_PAUSE_SECONDS = 0.5
AGENT_KEYS_TRIED = 5
"""Servers close after six refused keys."""
OUTPUT_BYTES = 256 * 1024
"""Kept of each output of a command; more is drained and counted."""
LATE_OUTPUT_SECONDS = 1.0
"""Silence after the exit status, until a command counts as over though its outputs stay open."""
EXIT_STATUS_SECONDS = 5.0
_POLL_MS = 250
_CHUNK_BYTES = 32 * 1024

_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""Names under which a key of a type is negotiated, where they differ from the type's own."""

OutputSink = Callable[[str], None]

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what went wrong is said by us, once


class LostConnectionError(StepFailedError):
    """The connection broke; what was begun may be done or not, and is looked at again."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command said. `status` is `None` where its end was not seen: that is no success."""

    status: int | None
    output: str
    errors: str
    timed_out: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the command ended, and well."""
        return self.status == 0

    @property
    def complaint(self) -> str:
        """Last lines of what it complained about, or of what it said, in one line."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return " / ".join(lines[-3:])[:500]


def fetch_host_key(host: str, port: int, pins: tuple[HostKey, ...]) -> HostKey:
    """Return the key that the server offers, of a pinned type where one is pinned.

    Raises `StepFailedError` where the server cannot be reached, or has no key of the pinned types.
    """
    with _transport(host, port, pins) as transport:
        return _offered(transport)


@contextmanager
def open_connection(target: Target, credentials: Credentials) -> Iterator[Connection]:
    """Connect to a host whose key is pinned, and sign in. Raises `StepFailedError`."""
    with _transport(target.host, target.port, target.pins) as transport:
        if not judge_pins(_offered(transport), target.pins, host=target.host, port=target.port):
            raise StepFailedError(
                f"no host key is pinned for {target.host} port {target.port}: confirm it first"
            )
        _sign_in(transport, target, credentials)
        connection = Connection(transport)
        try:
            yield connection
        finally:
            connection.close()


class Connection:
    """A signed-in connection."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._files: paramiko.SFTPClient | None = None

    def close(self) -> None:
        """Close what was opened on it."""
        if self._files is not None:
            self._files.close()

    def run(
        self, command: str, *, text: str = "", seconds: float = 30.0, sink: OutputSink | None = None
    ) -> CommandResult:
        """Run a command line, hand it `text` on its standard input, and drain both of its outputs.

        After `seconds` its channel is closed and the result says so. Raises `LostConnectionError`.
        """
        try:
            channel = self._transport.open_session(timeout=CHANNEL_SECONDS)
            with channel:
                channel.settimeout(seconds)
                channel.exec_command(command)
                channel.sendall(text.encode())
                channel.shutdown_write()
                return _drain(channel, time.monotonic() + seconds, sink)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise LostConnectionError(f"the connection was lost ({_words(error)})") from error

    @property
    def files(self) -> paramiko.SFTPClient:
        """File transfer on this connection. Raises `StepFailedError` where the server has none."""
        if self._files is None:
            try:
                client = paramiko.SFTPClient.from_transport(self._transport)
            except (paramiko.SSHException, OSError, EOFError) as error:
                raise StepFailedError(
                    f"the server has no SFTP ({_words(error)}): add a Subsystem sftp line to its sshd_config"
                ) from error
            if client is None:
                raise StepFailedError("the server has no SFTP")
            channel = client.get_channel()
            if channel is not None:
                channel.settimeout(CHANNEL_SECONDS)
            self._files = client
        return self._files

    @property
    def is_alive(self) -> bool:
        """Whether the connection still stands."""
        return self._transport.is_active()


def fingerprint_of(blob: bytes) -> str:
    """Return `SHA256:…` of a public key, as OpenSSH writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def clean(text: str) -> str:
    """Make text of a machine fit for a page: no control characters but line ends and tabs."""
    return "".join(
        c for c in text.replace("\r\n", "\n").replace("\r", "\n") if c in "\n\t" or c.isprintable()
    )


# -- connecting --------------------------------------------------------------------------------------
@contextmanager
def _transport(host: str, port: int, pins: tuple[HostKey, ...]) -> Iterator[paramiko.Transport]:
    transport = _begin(host, port, pins)
    try:
        yield transport
    finally:
        transport.close()


def _begin(host: str, port: int, pins: tuple[HostKey, ...]) -> paramiko.Transport:
    for attempt in range(1, BANNER_TRIES + 1):
        transport = paramiko.Transport(_reach(host, port))
        transport.banner_timeout = BANNER_SECONDS
        transport.handshake_timeout = HANDSHAKE_SECONDS
        transport.auth_timeout = AUTH_SECONDS
        _accept_only(transport, pins)
        try:
            transport.start_client(timeout=HANDSHAKE_SECONDS)
        except (paramiko.SSHException, OSError, EOFError) as error:
            transport.close()
            if attempt == BANNER_TRIES or not _is_crowded(error):
                raise _no_handshake(error, host, port, pins) from error
            time.sleep(BANNER_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311 - spreads, hides nothing
            continue
        transport.set_keepalive(KEEPALIVE_SECONDS)
        return transport
    raise AssertionError("the last attempt returns or raises")


def _reach(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except socket.gaierror as error:
        raise StepFailedError(f"the name {host} is not known here ({error.strerror})") from error
    except ConnectionRefusedError as error:
        raise StepFailedError(
            f"{host} refuses connections on port {port}: does an SSH server run there, on that port?"
        ) from error
    except OSError as error:
        raise StepFailedError(
            f"{host} port {port} cannot be reached ({_words(error)}): is it up, and open in the firewall?"
        ) from error


def _accept_only(transport: paramiko.Transport, pins: tuple[HostKey, ...]) -> None:
    """Have the server prove itself with a key of a type that was pinned, where any was."""
    if pins:
        wanted = {name for pin in pins for name in _ALGORITHMS.get(pin.key_type, (pin.key_type,))}
        options = transport.get_security_options()
        options.key_types = tuple(name for name in options.key_types if name in wanted)


def _is_crowded(error: Exception) -> bool:
    text = str(error).lower()
    return "banner" in text or isinstance(error, EOFError | ConnectionResetError) or "eof" in text


def _no_handshake(error: Exception, host: str, port: int, pins: tuple[HostKey, ...]) -> StepFailedError:
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer) and pins and "host key" in str(error):
        known = ", ".join(f"{pin.key_type} {pin.fingerprint}" for pin in pins)
        return StepFailedError(
            f"{host} port {port} has no host key of a known type any more; pinned is {known}. "
            "Another machine may answer there; if it was set up anew on purpose, forget the pinned key first"
        )
    return StepFailedError(f"{host} port {port} does not speak SSH as it should ({_words(error)})")


def _offered(transport: paramiko.Transport) -> HostKey:
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.get_base64(), fingerprint_of(key.asbytes()))


# -- signing in --------------------------------------------------------------------------------------
def _sign_in(transport: paramiko.Transport, target: Target, credentials: Credentials) -> None:
    who, how = f"{target.user}@{target.host}", _how(credentials)
    try:
        if credentials.private_key:
            key = read_private_key(credentials.private_key, credentials.passphrase)
            transport.auth_publickey(target.user, key)
        elif credentials.password:
            # By `password`, or by `keyboard-interactive` where only that is offered.
            transport.auth_password(target.user, credentials.password, fallback=True)
        else:
            _try_agent(transport, target.user)
    except paramiko.BadAuthenticationType as error:
        allowed = ", ".join(error.allowed_types)
        raise StepFailedError(f"the server does not let {who} in by {how}: it allows {allowed}") from error
    except paramiko.AuthenticationException as error:
        raise StepFailedError(f"{who} was refused with {how}: {_likely(credentials)}") from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise LostConnectionError(f"the connection was lost while signing in ({_words(error)})") from error
    if not transport.is_authenticated():
        raise StepFailedError(f"{who} was refused: the server wants a second proof, which is not supported")


def _likely(credentials: Credentials) -> str:
    if credentials.password:
        return "wrong password or user name, or the account is locked"
    return (
        "its public half is not in the user's authorized_keys, that file or a folder above it is writable "
        "by others, or the user name is wrong; the server's log says which"
    )


def _how(credentials: Credentials) -> str:
    if credentials.private_key:
        return "the private key"
    return "the password" if credentials.password else "the keys of the controllers' ssh-agent"


def _try_agent(transport: paramiko.Transport, user: str) -> None:
    agent = paramiko.Agent()
    try:
        keys = agent.get_keys()[:AGENT_KEYS_TRIED]
        if not keys:
            raise StepFailedError(
                "the controllers have no ssh-agent with a key: set SSH_AUTH_SOCK for them, or give a key here"
            )
        for key in keys:
            with suppress(paramiko.AuthenticationException):
                transport.auth_publickey(user, key)
                return
        raise paramiko.AuthenticationException("no key of the agent")
    finally:
        agent.close()


# -- running -----------------------------------------------------------------------------------------
class _Output:
    """One output of a command: its beginning, and how much more there was."""

    def __init__(self, sink: OutputSink | None) -> None:
        self._kept = bytearray()
        self._total = 0
        self._sink = sink

    def add(self, data: bytes) -> None:
        """Take in what arrived."""
        room = OUTPUT_BYTES - len(self._kept)
        self._kept += data[:room]
        self._total += len(data)
        if self._sink is not None and room > 0:
            self._sink(clean(data[:room].decode(errors="replace")))

    def text(self) -> str:
        """All that was kept."""
        left_out = self._total - len(self._kept)
        note = f"\n… {left_out} bytes more were left out\n" if left_out else ""
        return clean(self._kept.decode(errors="replace")) + note


def _drain(channel: paramiko.Channel, deadline: float, sink: OutputSink | None) -> CommandResult:
    output, errors = _Output(sink), _Output(sink)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    timed_out = False
    heard_at = time.monotonic()
    while not timed_out and not _is_over(channel, heard_at):
        poll.poll(_POLL_MS)
        if _has_data(channel) or not channel.exit_status_ready():
            heard_at = time.monotonic()
        _take(channel, output, errors)
        timed_out = time.monotonic() >= deadline
    _take(channel, output, errors)
    if timed_out:
        return CommandResult(None, output.text(), errors.text(), timed_out=True)
    channel.status_event.wait(min(EXIT_STATUS_SECONDS, max(0.1, deadline - time.monotonic())))
    _take(channel, output, errors)
    status = channel.exit_status if channel.exit_status_ready() else -1
    return CommandResult(status if status >= 0 else None, output.text(), errors.text())


def _is_over(channel: paramiko.Channel, heard_at: float) -> bool:
    """Whether nothing more will come: closed, or at its end, or ended and silent for a while.

    The exit status may overtake output that is on its way, so it ends nothing by itself; but what a
    command left behind may hold its outputs open for ever, so their end is not waited for either.
    """
    if channel.closed or (channel.eof_received and not _has_data(channel)):
        return True
    silent = time.monotonic() - heard_at >= LATE_OUTPUT_SECONDS
    return silent and channel.exit_status_ready() and not _has_data(channel)


def _has_data(channel: paramiko.Channel) -> bool:
    return channel.recv_ready() or channel.recv_stderr_ready()


def _take(channel: paramiko.Channel, output: _Output, errors: _Output) -> None:
    while channel.recv_ready():
        output.add(channel.recv(_CHUNK_BYTES))
    while channel.recv_stderr_ready():
        errors.add(channel.recv_stderr(_CHUNK_BYTES))


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return clean(str(text)).replace("\n", " ")[:200]
