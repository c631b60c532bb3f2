"""An address that other hosts cannot use is replaced or refused, with a reason, before it is used."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.agent.config import AgentConfig, ConfigError
from workers.agent.join import JoinError, choose_address
from workers.protocol.addresses import AddressError, HostPort, Outcome, assess_address, parse_host_port


@pytest.mark.parametrize(
    "address", ["10.0.0.7", "gpu-01.cluster.example", "2001:db8::7", "[2001:db8::7]:8000", "gpu_01"]
)
def test_address_that_others_can_use_is_accepted(address: str) -> None:
    verdict = assess_address(address, peer="10.0.0.99")
    assert (verdict.outcome, verdict.reason) == (Outcome.ACCEPT, "")
    assert verdict.address == parse_host_port(address).host


@pytest.mark.parametrize("address", ["", "  ", "0.0.0.0", "::", "[::]:80"])  # noqa: S104 - what is tested
def test_no_address_in_particular_is_replaced_by_where_the_node_comes_from(address: str) -> None:
    verdict = assess_address(address, peer="10.1.2.3:51234")
    assert (verdict.outcome, verdict.address) == (Outcome.REPLACE, "10.1.2.3")
    refused = assess_address(address)
    assert (refused.outcome, refused.address) == (Outcome.REFUSE, "")
    assert "not known" in refused.reason


@pytest.mark.parametrize(
    ("address", "scope"),
    [("127.0.0.1", "loopback"), ("127.8.8.8", "loopback"), ("localhost", "loopback"), ("::1", "loopback"),
     ("::ffff:127.0.0.1", "loopback"), ("169.254.30.2", "link-local"), ("fe80::1%eth0", "link-local"),
     ("[fe80::1%25eth0]:80", "link-local"), ("[fe80::1]", "link-local")],
)  # fmt: skip
def test_address_of_one_host_or_cable_is_refused_from_elsewhere(address: str, scope: str) -> None:
    verdict = assess_address(address, peer="10.1.2.3")
    assert (verdict.outcome, verdict.address) == (Outcome.REFUSE, "")
    assert scope in verdict.reason
    assert assess_address(address, peer="10.1.2.3", allow_local=True).outcome is Outcome.ACCEPT


def test_fleet_of_one_machine_may_use_loopback() -> None:
    assert assess_address("127.0.0.1", peer="127.0.0.1").outcome is Outcome.ACCEPT
    assert assess_address("localhost", peer="::1").outcome is Outcome.ACCEPT
    assert assess_address("", peer="127.0.0.1").address == "127.0.0.1"
    assert assess_address("169.254.1.1", peer="169.254.9.9").outcome is Outcome.REFUSE


def test_link_local_peer_is_no_replacement() -> None:
    verdict = assess_address("", peer="fe80::2%eth0")
    assert (verdict.outcome, verdict.address) == (Outcome.REFUSE, "")


@pytest.mark.parametrize(
    "address",
    ["224.0.0.1", "ff02::1", "255.255.255.255", "1.2.3", "a b", "http://x", "[::1", "x:99999", "::1]", "-a",
     "10.0.0.256", "[10.0.0.1]"],
)  # fmt: skip
def test_what_is_no_address_of_a_host_is_refused_with_a_reason(address: str) -> None:
    verdict = assess_address(address, peer="10.1.2.3")
    assert verdict.outcome is Outcome.REFUSE
    assert verdict.reason


def test_ipv6_is_written_in_brackets_and_its_zone_escaped() -> None:
    assert str(HostPort("2001:db8::7", 8000)) == "[2001:db8::7]:8000"
    assert str(HostPort("fe80::1%eth0", 80)) == "[fe80::1%25eth0]:80"
    assert str(HostPort("10.0.0.7", 80)) == "10.0.0.7:80"


PORTS = st.none() | st.integers(1, 65_535)
LABEL = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
V6 = st.ip_addresses(v=6).filter(lambda ip: ipaddress.IPv6Address(int(ip)).ipv4_mapped is None).map(str)
HOSTS = (
    st.ip_addresses(v=4).map(str)
    | V6
    | st.builds("fe80::{:x}%{}".format, st.integers(1, 0xFFFF), st.sampled_from(["eth0", "en0.5", "1"]))
    | st.lists(LABEL, min_size=1, max_size=4).map(".".join)
)


@given(st.builds(HostPort, HOSTS, PORTS))
def test_what_is_written_is_read_as_the_same(address: HostPort) -> None:
    assert parse_host_port(str(address)) == address
    if address.port is None:
        assert parse_host_port(address.host) == address


@given(st.text(max_size=40), st.text(max_size=20))
def test_any_text_gets_a_verdict_and_an_address_only_if_it_may_be_used(address: str, peer: str) -> None:
    verdict = assess_address(address, peer=peer)
    assert bool(verdict.address) == (verdict.outcome is not Outcome.REFUSE)
    if verdict.address:
        assert parse_host_port(verdict.address).host == verdict.address


def test_parse_refuses_by_its_own_error() -> None:
    with pytest.raises(AddressError, match="no port"):
        parse_host_port("10.0.0.1:")


def test_node_of_this_machines_fleet_joins_by_loopback_unasked() -> None:
    assert choose_address("", "http://127.0.0.1:8000") == "127.0.0.1"
    assert choose_address("::1", "http://127.0.0.1:8000") == "::1"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.30.2", "nonsense address"])
def test_node_of_another_machines_fleet_does_not_join_by_an_address_of_its_own_only(address: str) -> None:
    # A test network that no host is on: whatever way there is to it, it is not loopback.
    with pytest.raises(JoinError, match="--address"):
        choose_address(address, "https://192.0.2.1")


def test_local_address_is_taken_where_it_is_meant() -> None:
    assert choose_address("169.254.30.2", "https://192.0.2.1", allow_local=True) == "169.254.30.2"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1:80", "[::1]", "a b"])  # noqa: S104 - what is tested
def test_setting_that_is_no_address_of_a_host_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not usable"):
        AgentConfig(address=address).checked()


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1", "10.0.0.1", "gpu01"])
def test_setting_that_is_an_address_is_kept(address: str) -> None:
    assert AgentConfig(address=address).checked().address == address
