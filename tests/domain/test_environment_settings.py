"""Settings from the environment: wrong ones are refused with what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from exaserve_ops.settings.env import EnvironmentSettingError, read_environment, require


def test_nothing_set_gives_a_local_address_and_cannot_run() -> None:
    environment = read_environment({})
    assert environment.origin == "http://127.0.0.1:8000"
    with pytest.raises(EnvironmentSettingError, match="DATABASE_URL, REDIS_URL, EXAOPS_SECRET_KEY"):
        require(environment)


def test_public_url_gives_hosts_origin_path_and_tls() -> None:
    environment = read_environment({"EXAOPS_PUBLIC_URL": "https://ops.example:8443/fleet/"})
    assert environment.hosts == ["ops.example"]
    assert environment.origin == "https://ops.example:8443"
    assert (environment.base_path, environment.uses_tls) == ("/fleet", True)


@pytest.mark.parametrize("url", ["ops.example", "ftp://ops.example", "https://", ""])
def test_public_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(EnvironmentSettingError, match="EXAOPS_PUBLIC_URL"):
        read_environment({"EXAOPS_PUBLIC_URL": url})


@pytest.mark.parametrize("secret", ["abc", "zz" * 32, "ab" * 31, "ab" * 33])
def test_fleet_secret_of_another_size_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(EnvironmentSettingError) as caught:
        read_environment({"EXAOPS_FLEET_SECRET": secret})
    assert secret not in str(caught.value)


def test_agents_get_the_common_redis_unless_told_another() -> None:
    both = {"REDIS_URL": "redis://a", "EXAOPS_AGENT_REDIS_URL": "rediss://b"}
    assert read_environment(both).agent_redis_url == "rediss://b"
    assert read_environment({"REDIS_URL": "redis://a"}).agent_redis_url == "redis://a"


def test_nodes_have_users_of_their_own_unless_it_is_switched_off_in_so_many_words() -> None:
    assert read_environment({}).redis_node_users
    assert not read_environment({"EXAOPS_REDIS_NODE_USERS": "off"}).redis_node_users
    with pytest.raises(EnvironmentSettingError, match="EXAOPS_REDIS_NODE_USERS"):
        read_environment({"EXAOPS_REDIS_NODE_USERS": "no"})


def test_moves_are_bounded_as_told_and_sessions_live_as_long_as_gateways_are_told() -> None:
    told = {
        "EXAOPS_MOVES_PER_NODE": "0",
        "EXAOPS_MOVES_PER_FLEET": "8",
        "EXAOPS_MOVE_MIB_PER_SECOND": "100",
        "EXAOPS_FLEET_MOVE_MIB_PER_SECOND": "1000",
        "EXAOPS_GATEWAY_SESSION_SECONDS": "600",
    }
    environment = read_environment(told)
    assert (environment.moves_per_node, environment.moves_per_fleet) == (0, 8)
    assert environment.move_bytes_per_second == 100 << 20
    assert environment.fleet_move_bytes_per_second == 1000 << 20
    assert environment.session_seconds == 600
    with pytest.raises(EnvironmentSettingError, match="EXAOPS_MOVE_MIB_PER_SECOND"):
        read_environment({"EXAOPS_MOVE_MIB_PER_SECOND": "0"})


def test_database_connections_are_pooled_and_bounded(tmp_path: Path) -> None:
    entry = read_environment(
        {
            "DATABASE_URL": f"postgresql:///ops?host={tmp_path}&user=me",
            "EXAOPS_DATABASE_POOL_MAX_CONNECTIONS": "7",
        }
    ).database()
    assert (entry["NAME"], entry["USER"], entry["HOST"]) == ("ops", "me", str(tmp_path))
    assert entry["CONN_MAX_AGE"] == 0
    assert entry["OPTIONS"]["pool"]["max_size"] == 7


@pytest.mark.parametrize("count", ["0", "-1", "ten", "1.5", ""])
def test_pool_size_that_is_no_count_is_refused(count: str) -> None:
    with pytest.raises(EnvironmentSettingError, match="EXAOPS_DATABASE_POOL_MAX_CONNECTIONS"):
        read_environment({"EXAOPS_DATABASE_POOL_MAX_CONNECTIONS": count})


def test_address_that_is_no_database_is_refused() -> None:
    with pytest.raises(EnvironmentSettingError, match="DATABASE_URL"):
        read_environment({"DATABASE_URL": "postgresql://[broken"}).database()
