"""Registering a model leaves a manifest that every node can check its copy by."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.models import ModelManifest
from exaserve_ops.serving.services.models import ModelFacts, register_model
from tests.fakes.world import NOW
from workers.engines.demo_model import make_demo_model
from workers.protocol.manifest import Manifest, decode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    make_demo_model(folder, seed=0)
    return folder


def manifest_of(facts: ModelFacts) -> Manifest:
    assert facts.manifest is not None
    return decode(facts.manifest.body, facts.manifest.digest)


def test_manifest_has_every_file_and_the_digest_of_each_piece(folder: Path) -> None:
    told: list[int] = []
    facts = ModelFolder().read(str(folder), told.append)
    manifest = manifest_of(facts)
    assert {f.path for f in manifest.files} == {p.name for p in folder.iterdir()}
    assert sum(told) == manifest.total_bytes
    for file in manifest.files:
        content = (folder / file.path).read_bytes()
        pieces = [content[i : i + manifest.piece_bytes] for i in range(0, len(content), manifest.piece_bytes)]
        assert [blake3(piece).digest() for piece in pieces] == [
            file.piece_digest(n) for n in range(file.piece_count)
        ]


@pytest.mark.django_db
def test_manifest_is_kept_with_its_model_and_named_by_its_revision(folder: Path) -> None:
    facts = ModelFolder().read(str(folder))
    model = register_model(name="m", facts=facts, actor="test", now=NOW)
    kept = model.manifest
    assert decode(bytes(kept.body), kept.digest).revision == model.digest
    # The same bytes under another name have the same manifest, and a third time is no change.
    other = register_model(name="n", facts=facts, actor="test", now=NOW)
    register_model(name="n", facts=facts, actor="test", now=NOW)
    assert other.manifest.digest == kept.digest
    assert ModelManifest.objects.count() == 2


@pytest.mark.django_db
def test_model_that_was_recorded_without_a_manifest_gets_one_when_it_is_registered_again(
    folder: Path,
) -> None:
    facts = ModelFolder().read(str(folder))
    bare = ModelFacts(facts.source, facts.files, facts.architecture, facts.parameter_count, facts.config)
    register_model(name="m", facts=bare, actor="test", now=NOW)
    assert not ModelManifest.objects.exists()
    model = register_model(name="m", facts=facts, actor="test", now=NOW)
    assert facts.manifest is not None
    assert model.manifest.digest == facts.manifest.digest


@pytest.mark.parametrize("cut_bytes", [1_000_000, 16])
def test_shard_that_was_cut_at_its_publisher_is_refused_with_both_sizes(folder: Path, cut_bytes: int) -> None:
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-cut_bytes])
    with pytest.raises(InvalidInputError, match=rf"model\.safetensors has {size - cut_bytes:,} .* {size:,}"):
        ModelFolder().read(str(folder))


def test_bytes_behind_the_last_tensor_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    with weights.open("ab") as file:
        file.write(bytes(16))
    with pytest.raises(InvalidInputError, match=r"its header describes"):
        ModelFolder().read(str(folder))


def test_links_out_of_the_folder_are_refused_but_for_those_of_a_hub_cache(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("not for every node")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInputError, match=r"notes\.txt.*out of the folder"):
        ModelFolder().read(str(folder))
    (folder / "notes.txt").unlink()
    (folder / "extra").symlink_to(tmp_path)
    with pytest.raises(InvalidInputError, match="link to a folder"):
        ModelFolder().read(str(folder))
    (folder / "extra").unlink()
    plain = ModelFolder().read(str(folder))
    cache = tmp_path / "models--demo"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert manifest_of(ModelFolder().read(str(snapshot))) == manifest_of(plain)


def test_names_that_would_be_one_file_elsewhere_are_refused(folder: Path) -> None:
    (folder / "Config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="one file on some file systems"):
        ModelFolder().read(str(folder))
