"""Replicas of one node map one copy of a model's weights, and only ever a whole and true one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import wait_until
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.engine import TorchEngine
from workers.engines.torch_engine.packing import PackedWeight
from workers.engines.torch_engine.settings import EngineSettings
from workers.engines.torch_engine.shared_weights import CopyKind, NoRoomError, map_weights
from workers.engines.torch_engine.weights import LayerWeights, Matrix, ModelWeights, load_weights

CPU = torch.device("cpu")
HOLD = """
import sys, torch
from pathlib import Path
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.shared_weights import CopyKind, map_weights
cache, model = map(Path, sys.argv[1:])
weights = map_weights(cache, model, read_model_config(model), CopyKind(torch.float32, packed=True),
                      model_digest="m", on_progress=lambda _: None)
print(float(weights.embedding.sum()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def mapped(
    cache: Path,
    model: Path,
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    digest: str = "m",
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> ModelWeights:
    return map_weights(
        cache,
        model,
        read_model_config(model),
        CopyKind(dtype, packed=packed),
        model_digest=digest,
        on_progress=lambda _: None,
        free_bytes=free_bytes,
    )


def the_copy(cache: Path) -> Path:
    (path,) = cache.glob("*.safetensors")
    return path


def all_tensors(weights: ModelWeights) -> Iterator[Matrix]:
    yield from (weights.embedding, weights.norm, weights.head)
    for layer in weights.layers:
        values = (getattr(layer, field.name) for field in fields(LayerWeights))
        yield from (value for value in values if value is not None)


def assert_equal_weights(one: ModelWeights, other: ModelWeights) -> None:
    for first, second in zip(all_tensors(one), all_tensors(other), strict=True):
        if isinstance(first, PackedWeight):
            assert isinstance(second, PackedWeight)
            assert (first.layout, bytes(first.content)) == (second.layout, bytes(second.content))
        else:
            assert isinstance(second, torch.Tensor)
            assert torch.equal(first, second)


def own_weights(model: Path, dtype: torch.dtype = torch.float32, *, packed: bool = True) -> ModelWeights:
    config = read_model_config(model)
    return load_weights(
        model, config, device=CPU, dtype=dtype, on_progress=lambda _: None, pack_matrices=packed
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_weights_equal_loaded_ones(
    demo_model: Path, cache: Path, dtype: torch.dtype, packed: bool
) -> None:
    own = own_weights(demo_model, dtype, packed=packed)
    assert_equal_weights(mapped(cache, demo_model, dtype=dtype, packed=packed), own)
    assert isinstance(own.layers[0].down, PackedWeight) is packed


def test_second_replica_reads_nothing_of_the_model(demo_model: Path, cache: Path, tmp_path: Path) -> None:
    first = mapped(cache, demo_model)
    only_config = tmp_path / "model"
    only_config.mkdir()
    (only_config / "config.json").write_bytes((demo_model / "config.json").read_bytes())
    assert_equal_weights(first, mapped(cache, only_config))


def test_types_and_models_have_copies_of_their_own(demo_model: Path, cache: Path) -> None:
    mapped(cache, demo_model)
    mapped(cache, demo_model, dtype=torch.bfloat16)
    mapped(cache, demo_model, digest="another")
    mapped(cache, demo_model, packed=False)
    assert len(list(cache.glob("*.safetensors"))) == 4


def test_another_processor_has_a_copy_of_its_own(
    demo_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped(cache, demo_model)
    mapped(cache, demo_model, packed=False)
    # What oneDNN reads at its start to pretend to be on an older processor.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    mapped(cache, demo_model)
    mapped(cache, demo_model, packed=False)
    assert len(list(cache.glob("*.safetensors"))) == 3


def test_type_that_cannot_be_packed_is_shared_plain(
    demo_model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(
        demo_model, "m", device="cpu", dtype="float16", num_blocks=8, threads=1, weights_cache=cache
    )
    engine = TorchEngine(settings, read_model_config(demo_model))
    engine.start()
    try:
        wait_until(lambda: engine.readiness().status != "loading")
        assert engine.readiness().status == "ready", caplog.text
    finally:
        engine.stop()
    assert "shared weights are not packed: oneDNN does not multiply torch.float16" in caplog.text
    assert the_copy(cache).exists()


def test_scribbling_on_the_weights_harms_nobody_else(demo_model: Path, cache: Path) -> None:
    victim, culprit = mapped(cache, demo_model), mapped(cache, demo_model)
    culprit.embedding.fill_(float("nan"))
    down = culprit.layers[0].down
    assert isinstance(down, PackedWeight)
    assert down.memory is not None
    down.memory.zero_()
    assert_equal_weights(victim, own_weights(demo_model))
    assert_equal_weights(mapped(cache, demo_model), victim)


def test_copy_that_was_changed_on_disk_is_never_served(demo_model: Path, cache: Path) -> None:
    mapped(cache, demo_model)
    path = the_copy(cache)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\xff" * 64)
    assert_equal_weights(mapped(cache, demo_model), own_weights(demo_model))


def test_copy_that_was_only_touched_is_kept(demo_model: Path, cache: Path) -> None:
    mapped(cache, demo_model)
    path = the_copy(cache)
    inode = path.stat().st_ino
    os.utime(path)
    mapped(cache, demo_model)
    assert the_copy(cache).stat().st_ino == inode


def test_truncated_copy_and_broken_seal_are_made_anew(demo_model: Path, cache: Path) -> None:
    mapped(cache, demo_model)
    path = the_copy(cache)
    path.chmod(0o600)
    os.truncate(path, 1000)
    assert_equal_weights(mapped(cache, demo_model), own_weights(demo_model))
    path.with_suffix(".json").write_text(json.dumps({"blake2b": 3}))
    assert_equal_weights(mapped(cache, demo_model), own_weights(demo_model))


def test_draft_of_a_killed_writer_is_no_obstacle(demo_model: Path, cache: Path) -> None:
    mapped(cache, demo_model)
    path = the_copy(cache)
    path.rename(path.with_suffix(".part"))
    assert_equal_weights(mapped(cache, demo_model), own_weights(demo_model))
    assert not path.with_suffix(".part").exists()


def test_replicas_that_start_together_write_once(demo_model: Path, cache: Path) -> None:
    holders = [hold(cache, demo_model) for _ in range(3)]
    try:
        sums = {holder.stdout.readline() for holder in holders if holder.stdout}
    finally:
        for holder in holders:
            holder.communicate()
    assert len(sums) == 1
    assert b"." in sums.pop()
    assert len(list(cache.glob("*.safetensors"))) == 1


def test_unused_copies_give_way_and_used_ones_do_not(demo_model: Path, cache: Path) -> None:
    holder = hold(cache, demo_model)
    assert holder.stdout is not None
    holder.stdout.readline()
    room = int(the_copy(cache).stat().st_size * 1.5)

    def free_bytes(folder: Path) -> int:
        """A disk that has room for one copy and no second."""
        return max(0, room - sum(path.stat().st_size for path in folder.glob("*.safetensors")))

    with pytest.raises(NoRoomError, match="bytes free"):
        mapped(cache, demo_model, digest="another", free_bytes=free_bytes)
    holder.communicate()
    mapped(cache, demo_model, digest="another", free_bytes=free_bytes)
    assert len(list(cache.glob("*.safetensors"))) == 1


def hold(cache: Path, model: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(cache), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
