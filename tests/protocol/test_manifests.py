"""A manifest names bytes that nobody can change, and writes nowhere but into its own folder."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from blake3 import blake3

from workers.protocol import manifest as m

PIECE = 64 * 1024


def a_file(path: str, content: bytes) -> m.ManifestFile:
    pieces = b"".join(blake3(content[i : i + PIECE]).digest() for i in range(0, len(content), PIECE))
    return m.ManifestFile(path, len(content), hashlib.sha256(content).hexdigest(), pieces)


def make(*paths: str) -> m.Manifest:
    files = tuple(a_file(path, path.encode() * 20_000) for path in sorted(paths))
    return m.Manifest(m.revision_of(files), PIECE, files)


def test_a_manifest_comes_back_from_its_bytes_and_is_named_by_them() -> None:
    manifest = make("model.safetensors", "config.json", "sub/tokenizer.json")
    digest, data = m.encode(manifest)
    assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert m.decode(data, digest) == manifest
    assert m.key_of(digest) == f"exaops:manifest:{digest}"
    assert manifest.total_bytes == sum(f.size_bytes for f in manifest.files)


def test_one_changed_byte_is_another_manifest() -> None:
    digest, data = m.encode(make("a.bin"))
    with pytest.raises(m.ManifestError, match="not those of manifest"):
        m.decode(data[:-1] + bytes([data[-1] ^ 1]), digest)


def test_bytes_of_that_name_that_are_no_manifest_are_refused() -> None:
    junk = b"\x93\x01\x02\x03"
    with pytest.raises(m.ManifestError, match="not a manifest"):
        m.decode(junk, m.digest_of(junk))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../other/model.safetensors",
        "a/../../b",
        "a//b",
        "./a",
        "a/.",
        ".hidden",
        "sub/.git/config",
        "a\\b",
        "a\0b",
        "a\nb",
        "a/",
        "x" * 256,
        "d/" * 260 + "a",
        "\ud800",
    ],
)
def test_a_path_that_could_leave_the_folder_or_hide_is_refused(path: str) -> None:
    with pytest.raises(m.ManifestError):
        m.check_paths([path])


@pytest.mark.parametrize(
    "paths",
    [
        ("Model.bin", "model.bin"),
        ("caf\u00e9.bin", "cafe\u0301.bin"),
        ("stra\u00dfe", "strasse"),
        ("\ufb01le", "file"),
        ("a", "a/b"),
        ("A/c", "a"),
    ],
)
def test_paths_that_some_file_systems_take_for_one_another_are_refused(paths: tuple[str, str]) -> None:
    with pytest.raises(m.ManifestError):
        m.check_paths(sorted(paths))


def test_a_path_twice_or_out_of_order_is_refused() -> None:
    for paths in (["a", "a"], ["b", "a"]):
        with pytest.raises(m.ManifestError, match="order"):
            m.check_paths(paths)


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": -1},
        {"size_bytes": 1 << 60},
        {"size_bytes": PIECE},
        {"sha256": "ab"},
        {"sha256": "AB" * 32},
        {"pieces": b""},
        {"pieces": b"\0" * 31},
    ],
)
def test_files_whose_sizes_and_digests_do_not_add_up_are_refused(change: dict[str, object]) -> None:
    file = msgspec.structs.replace(a_file("a.bin", b"x" * (3 * PIECE + 1)), **change)
    with pytest.raises(m.ManifestError, match=r"a\.bin"):
        m.encode(m.Manifest(m.revision_of((file,)), PIECE, (file,)))


def test_a_manifest_is_of_the_revision_that_it_says() -> None:
    manifest = msgspec.structs.replace(make("a.bin"), revision=make("b.bin").revision)
    with pytest.raises(m.ManifestError, match="not those of revision"):
        m.encode(manifest)


@pytest.mark.parametrize("piece_bytes", [0, -1, 1000, PIECE + 1, 1 << 30])
def test_pieces_of_an_odd_size_are_refused(piece_bytes: int) -> None:
    with pytest.raises(m.ManifestError, match="pieces"):
        m.encode(msgspec.structs.replace(make("a.bin"), piece_bytes=piece_bytes))


def test_pieces_cover_a_file_without_gap_or_overlap() -> None:
    for size in (0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE):
        file = a_file("a.bin", b"z" * size)
        spans = [m.piece_span(file, index, PIECE) for index in range(file.piece_count)]
        assert sum(length for _, length in spans) == size
        assert [offset for offset, _ in spans] == list(range(0, size, PIECE))
        assert all(file.piece_digest(i) == blake3(b"z" * n).digest() for i, (_, n) in enumerate(spans))
