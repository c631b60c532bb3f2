"""Released bytes decode for ever; strangers, forgeries and unknown kinds are refused by type."""

from __future__ import annotations

import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol import samples
from workers.agent.heartbeat import encode_within_bound
from workers.protocol import digests, v1
from workers.protocol.observed import ExitInfo, ObservedState, ReplicaObserved

GOLDEN = sorted(samples.FOLDER.glob("*.bin"))


def decode(data: bytes, key: bytes = samples.NODE_KEY) -> v1.Report | v1.Command:
    envelope = v1.open_envelope(data)
    try:
        return v1.decode_report(envelope, node_key=key)
    except v1.ForgedMessageError:
        return v1.decode_command(envelope, node_key=key)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_released_bytes_still_mean_the_same(path: Path) -> None:
    current = {
        samples.file_name(kind): sample for kind, sample in {**samples.REPORTS, **samples.COMMANDS}.items()
    }
    assert decode(path.read_bytes()) == {**current, **samples.OLDER}[path.stem]


def test_every_kind_has_golden_bytes_with_every_field_set() -> None:
    kinds = {
        kind.__struct_config__.tag for kind in (*typing.get_args(v1.Report), *typing.get_args(v1.Command))
    }
    assert {path.stem for path in GOLDEN} - set(samples.OLDER) == {samples.file_name(kind) for kind in kinds}
    for message in (*samples.REPORTS.values(), *samples.COMMANDS.values()):
        left_out = [
            field.name
            for field in msgspec.structs.fields(message)
            if not field.required and getattr(message, field.name) == field.default
        ]
        assert left_out == []


def envelope_of(body: dict[str, object], key: bytes, *, major: int = v1.MAJOR) -> bytes:
    data = msgspec.msgpack.encode(body)
    seal = digests.seal(key, samples.NODE_ID, data)
    return msgspec.msgpack.encode([major, samples.NODE_ID, data, seal])


REPORT_KEY = digests.report_key(samples.NODE_KEY)


def test_fields_of_a_later_minor_are_ignored() -> None:
    body = msgspec.to_builtins(samples.REPORTS["command_result"]) | {"colour": "blue", "list": [1]}
    assert decode(envelope_of(body, REPORT_KEY)) == samples.REPORTS["command_result"]


def test_unknown_kind_and_unknown_major_are_refused_as_unknown() -> None:
    with pytest.raises(v1.UnknownMessageError, match="kind"):
        v1.decode_report(
            v1.open_envelope(envelope_of({"kind": "teapot"}, REPORT_KEY)), node_key=samples.NODE_KEY
        )
    with pytest.raises(v1.UnknownMessageError, match="major 2"):
        v1.open_envelope(envelope_of({"kind": "hello"}, REPORT_KEY, major=2))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", msgspec.msgpack.encode({"a": 1})])
def test_other_bytes_are_refused_as_malformed(data: bytes) -> None:
    with pytest.raises(v1.MalformedMessageError):
        v1.open_envelope(data)


def test_report_with_a_missing_field_is_refused_as_malformed() -> None:
    body: dict[str, object] = {"kind": "command_result", "node_id": samples.NODE_ID}
    with pytest.raises(v1.MalformedMessageError):
        v1.decode_report(v1.open_envelope(envelope_of(body, REPORT_KEY)), node_key=samples.NODE_KEY)


def test_one_node_cannot_speak_for_another() -> None:
    other = digests.node_key(b"golden-fleet-secret-of-32-bytes!", "other", 1)
    data = v1.encode_report(samples.REPORTS["hello"], node_id=samples.NODE_ID, node_key=other)
    with pytest.raises(v1.ForgedMessageError):
        v1.decode_report(v1.open_envelope(data), node_key=samples.NODE_KEY)


def test_raised_key_epoch_revokes_what_was_sealed_before() -> None:
    data = samples.encoded()["hello"]
    later = digests.node_key(b"golden-fleet-secret-of-32-bytes!", samples.NODE_ID, 2)
    with pytest.raises(v1.ForgedMessageError):
        v1.decode_report(v1.open_envelope(data), node_key=later)


def test_a_report_cannot_be_replayed_as_a_command() -> None:
    with pytest.raises(v1.ForgedMessageError):
        v1.decode_command(v1.open_envelope(samples.encoded()["hello"]), node_key=samples.NODE_KEY)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int) -> None:
    data = bytearray(samples.encoded()["command_result"])
    data[position % len(data)] ^= change
    try:
        decoded = decode(bytes(data))
    except v1.ProtocolError:
        return
    assert decoded == samples.REPORTS["command_result"]  # a longer way to write the same value


def test_message_over_the_bound_is_neither_sent_nor_read() -> None:
    lines = ("x" * 1000,) * 300
    chunk = v1.LogChunk(node_id=samples.NODE_ID, replica_id="r", attempt=1, lines=lines)
    with pytest.raises(v1.MalformedMessageError, match="over"):
        v1.encode_report(chunk, node_id=samples.NODE_ID, node_key=samples.NODE_KEY)
    with pytest.raises(v1.MalformedMessageError, match="over"):
        v1.open_envelope(b"x" * (v1.MAX_MESSAGE_BYTES + 1))


def test_heartbeat_over_the_bound_is_sent_lighter_rather_than_not_at_all() -> None:
    heartbeat = samples.REPORTS["heartbeat"]
    assert isinstance(heartbeat, v1.Heartbeat)
    tail = ExitInfo(attempt=1, code=1, log_tail=("x" * 1000,) * 20)
    replica = msgspec.structs.replace(heartbeat.replicas[0], last_exit=tail)
    heavy = msgspec.structs.replace(heartbeat, replicas=(replica,) * 40)
    sent = decode(encode_within_bound(heavy, node_id=samples.NODE_ID, node_key=samples.NODE_KEY))
    assert isinstance(sent, v1.Heartbeat)
    assert [r.state for r in sent.replicas] == [ObservedState.READY] * 40
    assert sent.replicas[0].last_exit == ExitInfo(attempt=1, code=1)


TEXT = st.text(max_size=40)


@given(
    state=st.sampled_from(ObservedState),
    reason=TEXT,
    lines=st.lists(TEXT, max_size=5),
    number=st.floats(allow_nan=False),
    pid=st.none() | st.integers(0, 2**31),
)
def test_any_replica_survives_the_way(
    state: ObservedState, reason: str, lines: list[str], number: float, pid: int | None
) -> None:
    replica = ReplicaObserved(
        replica_id="r",
        generation=1,
        state=state,
        reason=reason,
        pid=pid,
        uptime_seconds=number,
        last_exit=ExitInfo(attempt=1, log_tail=tuple(lines)),
    )
    heartbeat = samples.REPORTS["heartbeat"]
    assert isinstance(heartbeat, v1.Heartbeat)
    sent = msgspec.structs.replace(heartbeat, replicas=(replica,))
    data = v1.encode_report(sent, node_id=samples.NODE_ID, node_key=samples.NODE_KEY)
    assert decode(data) == sent
