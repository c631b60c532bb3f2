"""A broken file of weights is named with its sizes before anybody fetches or launches it."""

from __future__ import annotations

import json

import pytest

from workers.protocol.shards import MAX_HEADER_BYTES, ShardError, check_index, read_header

NAME = "model-00001-of-00002.safetensors"
DATA = bytes(24)


def shard(header: object = None, data: bytes = DATA) -> bytes:
    said = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}} if header is None else header
    text = json.dumps(said).encode()
    return len(text).to_bytes(8, "little") + text + data


def header_of(content: bytes) -> dict[str, object]:
    return read_header(NAME, len(content), lambda offset, length: content[offset : offset + length])


def test_a_whole_shard_is_read() -> None:
    assert list(header_of(shard())) == ["w"]
    two = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]},
        "a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
        "none": {"dtype": "F32", "shape": [0], "data_offsets": [20, 20]},
    }
    assert len(header_of(shard(two))) == 4


@pytest.mark.parametrize("kept", range(8))
def test_a_shard_cut_inside_the_length_of_its_header_is_named_with_its_size(kept: int) -> None:
    with pytest.raises(ShardError, match=rf"{NAME} has {kept} bytes"):
        header_of(shard()[:kept])


@pytest.mark.parametrize("cut_bytes", [1, 20, 24, 25, 60])
def test_a_shorter_shard_is_named_with_both_sizes(cut_bytes: int) -> None:
    whole = shard()
    with pytest.raises(ShardError, match=rf"{NAME} has {len(whole) - cut_bytes} bytes") as caught:
        header_of(whole[:-cut_bytes])
    assert str(len(whole)) in str(caught.value) or "inside its header of" in str(caught.value)


def test_trailing_bytes_are_named_with_both_sizes() -> None:
    whole = shard()
    with pytest.raises(ShardError, match=f"{len(whole) + 16} bytes, and its header describes {len(whole)}"):
        header_of(whole + bytes(16))


@pytest.mark.parametrize("claimed", [0, 200_000_000, MAX_HEADER_BYTES + 1, 2**64 - 1])
def test_a_header_that_claims_too_much_is_never_read(claimed: int) -> None:
    content = claimed.to_bytes(8, "little") + b"{}"

    def read_at(offset: int, length: int) -> bytes:
        assert length <= 8
        return content[offset : offset + length]

    with pytest.raises(ShardError, match=f"claims a header of {claimed:,}"):
        read_header(NAME, len(content), read_at)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"w": {"data_offsets": [0, 20]}, "v": {"data_offsets": [16, 24]}},
        {"w": {"data_offsets": [0, 8]}, "v": {"data_offsets": [16, 24]}},
        {"w": {"data_offsets": [4, 24]}},
        {"w": {"data_offsets": [24, 0]}},
        {"w": {"data_offsets": [-1, 24]}},
        {"w": {"data_offsets": [0, 24.0]}},
        {"w": {"data_offsets": [False, 24]}},
        {"w": {"data_offsets": "all"}},
        {"w": {}},
        {"w": 1},
        {"w": {"data_offsets": [0, 2**63]}},
    ],
)
def test_tensors_that_overlap_leave_gaps_or_lie_nowhere_are_refused(header: object) -> None:
    with pytest.raises(ShardError, match=NAME):
        header_of(shard(header))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_header_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ShardError, match=NAME):
        header_of(len(text).to_bytes(8, "little") + text + DATA)


def test_an_index_names_only_shards_that_are_there() -> None:
    index = {"weight_map": {"a": NAME, "b": "model-00002-of-00002.safetensors"}}
    check_index("model.safetensors.index.json", index, {NAME, "model-00002-of-00002.safetensors"})
    check_index("part/model.safetensors.index.json", {"weight_map": {"a": "x"}}, {"part/x"})
    with pytest.raises(ShardError, match="2 shards, and model-00002-of-00002"):
        check_index("model.safetensors.index.json", index, {NAME})
    for broken in (None, [], {}, {"weight_map": []}, {"weight_map": {}}):
        with pytest.raises(ShardError, match="weight_map"):
            check_index("model.safetensors.index.json", broken, {NAME})
