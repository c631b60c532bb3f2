"""The gateway's environment: what cannot work is refused when it starts, by name."""

from __future__ import annotations

import pytest

from exaserve_ops.gateway.settings import SettingsError, read_settings
from tests.gateway.harness import SECRET

ENVIRONMENT = {
    "EXAOPS_GATEWAY_PORT": "0",
    "REDIS_URL": "unix:///nowhere",
    "EXAOPS_FLEET_SECRET": SECRET.hex(),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CONTINUATIONS", "-1"),
        ("WAIT_SECONDS", "-0.5"),
        ("IDLE_SECONDS", "nan"),
        ("LONG_PROMPT_SHARE", "inf"),
        ("SESSION_SECONDS", "0"),
        ("IN_FLIGHT_PER_REPLICA", "0"),
    ],
)
def test_number_that_is_no_bound_is_refused_by_its_name(name: str, value: str) -> None:
    assert read_settings(ENVIRONMENT | {"EXAOPS_GATEWAY_CONTINUATIONS": "0"}).continuations == 0
    with pytest.raises(SettingsError, match=f"EXAOPS_GATEWAY_{name} is {value}"):
        read_settings(ENVIRONMENT | {f"EXAOPS_GATEWAY_{name}": value})


@pytest.mark.parametrize(
    "name", ["authorization", "Content-Length", "x-traffic-class", "x-exaops-id", "a b", "cookie"]
)
def test_header_with_a_meaning_of_its_own_cannot_be_made_to_name_sessions(name: str) -> None:
    environment = ENVIRONMENT | {"EXAOPS_GATEWAY_SESSION_HEADERS": "x-session-id, x-talk"}
    assert read_settings(environment).session_header_names == (b"x-session-id", b"x-talk")
    with pytest.raises(SettingsError, match=name.lower()):
        read_settings(environment | {"EXAOPS_GATEWAY_SESSION_HEADERS": f"x-session-id,{name}"})
