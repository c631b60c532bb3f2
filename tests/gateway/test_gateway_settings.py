"""The gateway's environment: what cannot work is refused when it starts, by name."""

from __future__ import annotations

import pytest

from exaserve_ops.gateway.settings import SettingsError, read_settings
from tests.gateway.harness import SECRET


@pytest.mark.parametrize(
    "name", ["authorization", "Content-Length", "x-traffic-class", "x-exaops-id", "a b", "cookie"]
)
def test_header_with_a_meaning_of_its_own_cannot_be_made_to_name_sessions(name: str) -> None:
    environment = {
        "EXAOPS_GATEWAY_PORT": "1",
        "REDIS_URL": "unix:///nowhere",
        "EXAOPS_FLEET_SECRET": SECRET.hex(),
        "EXAOPS_GATEWAY_SESSION_HEADERS": "x-session-id, x-talk",
    }
    assert read_settings(environment).session_header_names == (b"x-session-id", b"x-talk")
    with pytest.raises(SettingsError, match=name.lower()):
        read_settings(environment | {"EXAOPS_GATEWAY_SESSION_HEADERS": f"x-session-id,{name}"})
