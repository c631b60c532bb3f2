"""What a model's replicas share is read once, for just that model, and leaves nothing that a fork lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.engines.base import LaunchContext
from workers.engines.torch_adapter import TorchAdapter
from workers.engines.torch_engine import prepared
from workers.engines.torch_engine.tokenizer import TokenizerError

PREPARE = """
import os, sys
from workers.engines.torch_engine.prepared import prepare
assert "torch" not in sys.modules
prepare(*sys.argv[1:])
print(len(os.listdir("/proc/self/task")))
"""


def test_prepared_tokenizer_is_that_of_its_model_only(demo_model: Path) -> None:
    prepared.prepare(str(demo_model), "digest-1")
    first = prepared.tokenizer_of(demo_model, "digest-1")
    assert prepared.tokenizer_of(demo_model, "digest-1") is first
    for other in (prepared.tokenizer_of(demo_model, "digest-2"), prepared.tokenizer_of(demo_model, "")):
        assert other is not first
        assert other.encode_text("hello") == first.encode_text("hello")


def test_nothing_is_kept_of_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        prepared.prepare(str(tmp_path), "digest-3")
    with pytest.raises(TokenizerError):
        prepared.tokenizer_of(tmp_path, "digest-3")


def test_preparing_leaves_one_thread(demo_model: Path) -> None:
    command = [sys.executable, "-c", PREPARE, str(demo_model), "digest"]
    # As in a template: numpy would start threads of its own.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.split() == ["1"]


def test_only_a_model_with_a_digest_is_prepared(tmp_path: Path) -> None:
    def launch_prepares(digest: str) -> tuple[str, ...]:
        context = LaunchContext(
            replica_id="r1",
            attempt=1,
            served_model_name="m",
            model_dir=tmp_path,
            host="127.0.0.1",
            ports=(1234,),
            api_key="k",
            runtime_dir=tmp_path,
            model_digest=digest,
        )
        return TorchAdapter().build_launch({}, context).prepare

    assert launch_prepares("") == ()
    assert launch_prepares("d")[1:] == (str(tmp_path), "d")
