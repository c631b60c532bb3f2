"""Addresses that a node may be reached by: parsed, written, and judged before anybody is sent there."""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass

_HOST_NAME = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_OLD_IP = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)(\.(0[xX][0-9a-fA-F]+|[0-9]+)){0,3}\.?")
_ZONE = re.compile(r"[A-Za-z0-9_.@-]{1,32}")
_HIGHEST_PORT = 65_535
_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("169.254.169.254", "100.100.100.200", "fd00:ec2::254")
)
"""Where clouds tell a machine its credentials."""

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressError(ValueError):
    """No host, or host and port, in any form that is understood."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host, as IP address or name without brackets, and perhaps a port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        """As it stands in a URL: an IPv6 address in brackets, its zone with `%25`."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


class Outcome(enum.Enum):
    """What to do with an address."""

    ACCEPT = "accept"
    REPLACE = "replace"
    """Use the address that the node was seen to come from."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement and the address to use (empty where it is refused)."""

    outcome: Outcome
    address: str
    reason: str


def parse_host_port(text: str) -> HostPort:
    """Read `host`, `host:port`, `::1`, `[::1]:80` and `fe80::1%eth0`. Raises `AddressError`."""
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or ":" not in host:
            raise AddressError(f"{text!r}: brackets go around an IPv6 address, as in [::1]:8000")
        return HostPort(_host(host.replace("%25", "%")), _port(rest[1:]) if rest else None)
    if text.count(":") > 1:
        return HostPort(_host(text))
    host, colon, port = text.partition(":")
    return HostPort(_host(host), _port(port) if colon else None)


def assess_address(address: str, *, peer: str = "", allow_local: bool = False) -> Verdict:
    """Judge what a node says it is reached by; `peer` is the address that it was seen to come from.

    Loopback and link-local addresses mean something only on the host or the cable itself: they are
    accepted with `allow_local`, or where the peer is that same address, as on a fleet of one machine.
    """
    if not address.strip():
        return _by_peer("no address was given", peer, allow_local=allow_local)
    try:
        host = parse_host_port(address).host
    except AddressError as error:
        return Verdict(Outcome.REFUSE, "", str(error))
    ip = _parse_ip(host)
    if ip is not None and ip.is_unspecified:
        return _by_peer(
            f"{host} is every address of a host and none in particular", peer, allow_local=allow_local
        )
    if ip is not None and (ip.is_multicast or host == "255.255.255.255"):
        return Verdict(Outcome.REFUSE, "", f"{host} is no address of a single host")
    return _judge_scope(host, ip, peer=peer, allow_local=allow_local)


def is_loopback(address: str) -> bool:
    """Whether it is an IP address, or a name, of the very host that uses it."""
    return _local_scope(address, _parse_ip(address)) == "loopback"


def is_reserved_for_host(ip: Ip, *, allow_loopback: bool = False) -> bool:
    """Whether an address means the host that uses it, its cable, or the metadata service of its cloud.

    `allow_loopback`: the host itself is no fault; its cable and its cloud's service stay one.
    """
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped if isinstance(mapped, ipaddress.IPv4Address) else ip
    if ip.is_loopback:
        return not allow_loopback
    return ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip in _METADATA


def names_reserved_host(host: str, *, allow_loopback: bool = False) -> bool:
    """The same of a host as somebody wrote it; a name that resolves there is found when it is used.

    Old ways to write an address are read as resolvers read them: `2130706433`, `127.1`, `0x7f.0.0.1`.
    """
    ip = _parse_ip(host.strip("[]")) or _parse_old_ip(host)
    if ip is not None:
        return is_reserved_for_host(ip, allow_loopback=allow_loopback)
    return _local_scope(host, None) == "loopback" and not allow_loopback


def _judge_scope(host: str, ip: Ip | None, *, peer: str, allow_local: bool) -> Verdict:
    scope = _local_scope(host, ip)
    if not scope:
        return Verdict(Outcome.ACCEPT, host, "")
    if allow_local or _same_place(scope, host, peer):
        return Verdict(Outcome.ACCEPT, host, f"{host} is {scope}: reached from there only")
    return Verdict(
        Outcome.REFUSE, "", f"{host} is {scope}: other hosts cannot reach it; give an address they can"
    )


def _by_peer(why: str, peer: str, *, allow_local: bool) -> Verdict:
    try:
        host = parse_host_port(peer).host if peer.strip() else ""
    except AddressError:
        host = ""
    ip = _parse_ip(host)
    if ip is None or ip.is_unspecified or ip.is_multicast:
        return Verdict(Outcome.REFUSE, "", f"{why}, and where the node comes from is not known")
    if (scope := _local_scope(host, ip)) and not (allow_local or ip.is_loopback):
        return Verdict(Outcome.REFUSE, "", f"{why}, and the node comes from {host}, which is {scope}")
    return Verdict(Outcome.REPLACE, host, f"{why}: {host}, where it comes from, is used")


def _local_scope(host: str, ip: Ip | None) -> str:
    if ip is None:
        name = host.lower().rstrip(".")
        return "loopback" if name == "localhost" or name.endswith(".localhost") else ""
    if ip.is_loopback:
        return "loopback"
    return "link-local" if ip.is_link_local else ""


def _same_place(scope: str, host: str, peer: str) -> bool:
    try:
        other = parse_host_port(peer).host if peer.strip() else ""
    except AddressError:
        return False
    # All loopback addresses are one host; a link-local one is good only if it is the very same.
    return bool(other) and (other == host or (scope == "loopback" == _local_scope(other, _parse_ip(other))))


def _host(text: str) -> str:
    ip = _parse_ip(text)
    if ip is not None:
        zone = getattr(ip, "scope_id", None)
        if zone is not None and not _ZONE.fullmatch(zone):
            raise AddressError(f"{text!r}: {zone!r} is no name of an interface")
        return str(ip)
    if ":" in text or re.fullmatch(r"[0-9.]+", text) or not _HOST_NAME.fullmatch(text):
        raise AddressError(f"{text!r} is neither an IP address nor a host name")
    return text


def _parse_ip(text: str) -> Ip | None:
    """The address; IPv4 in IPv6 clothes (`::ffff:10.0.0.1`) is the IPv4 address that it means."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(ip, "ipv4_mapped", None)
    return mapped if isinstance(mapped, ipaddress.IPv4Address) else ip


def _parse_old_ip(text: str) -> Ip | None:
    if not _OLD_IP.fullmatch(text):
        return None
    try:
        numbers = [_old_number(part) for part in text.rstrip(".").split(".")]
        *first, last = numbers
        # The last number fills the bytes that are left: 127.1 is 127.0.0.1.
        return ipaddress.IPv4Address(bytes(first) + last.to_bytes(4 - len(first), "big"))
    except (ValueError, OverflowError):
        return None


def _old_number(text: str) -> int:
    """Hexadecimal after `0x`, octal after `0`. Raises `ValueError`."""
    if text[:2].lower() == "0x":
        return int(text, 16)
    return int(text, 8 if len(text) > 1 and text.startswith("0") else 10)


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) <= _HIGHEST_PORT:
        raise AddressError(f"{text!r} is no port")
    return int(text)
