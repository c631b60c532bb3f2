"""Weights that a holder has once for all replicas: filled, mapped, sealed, and gone with the last user.

Between real processes, over the host's memory, which the same protocol shares; the code for CUDA's driver
is tried with a FAKE library in `tests/kv`, and with a device in `tests/cuda`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import EngineProcess, engine_starter, wait_until
from tests.fakes.kv_tenant import patient_link
from workers.engines.torch_engine import holder_weights
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.holder_place import HolderPlace, open_place
from workers.engines.torch_engine.holder_weights import checksum_of, hold_weights
from workers.engines.torch_engine.weights import LayerWeights, ModelWeights, WeightsError, load_weights
from workers.kv.holder_link import is_holder_there, socket_of
from workers.kv.holder_wire import (
    AskStatus,
    Done,
    HeldWeights,
    OpenWeights,
    RejectWeights,
    SealWeights,
    Status,
    Weights,
    close_all,
)
from workers.kv.pool import NodePools, pools_folder

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
USE = """
import ctypes, os, sys
from pathlib import Path
from workers.kv.holder_link import HolderLink
from workers.kv.holder_wire import Done, OpenWeights, SealWeights, Weights
from workers.kv.memory import HostMemory

def open_weights():
    answer, (descriptor,) = link.ask(OpenWeights("w", 8192), Weights, seconds=50)
    return answer.state, memory.adopt(descriptor, answer.size_bytes)

path, what = sys.argv[1:]
link, memory = HolderLink(Path(path)), HostMemory()
address = memory.reserve(8192)
state, piece = open_weights()
if state == "fill":
    memory.map(address, piece, writable=True)
    ctypes.memset(address, 0x77, 4096)
    if what == "stop":
        print("half", flush=True)
        sys.stdin.read()
    assert ctypes.string_at(address + 4096, 4) == bytes(4), "not wiped"
    ctypes.memset(address, os.getpid() % 250 + 1, 8192)
    memory.unmap(address, 8192)
    link.ask(SealWeights("w", "sum"), Done)
    state, piece = open_weights()
memory.map(address, piece, writable=False)
print(state, set(ctypes.string_at(address, 8192)), flush=True)
if what == "scribble":
    ctypes.memset(address, 1, 1)
sys.stdin.read()
"""
"""A replica as far as its weights go, without torch."""


class HolderProcess:
    """A holder of host memory."""

    def __init__(self, folder: Path, *, linger_seconds: float = 0.0, limit_bytes: int | None = None) -> None:
        self.socket = socket_of(folder, "host-0")
        limit = () if limit_bytes is None else (f"--limit-bytes={limit_bytes}",)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "workers.kv.holder", "--memory=host", "--accelerator=host-0"),
                *(f"--socket={self.socket}", f"--pools={folder}", "--idle-seconds=600"),
                *(f"--linger-seconds={linger_seconds}", *limit),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: is_holder_there(self.socket), seconds=60)

    def weights(self) -> tuple[HeldWeights, ...]:
        link = patient_link(self.socket)
        status, _ = link.ask(AskStatus(), Status)
        link.close()
        return status.weights

    def users(self) -> int:
        return sum(copy.users for copy in self.weights())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path)
    yield folder
    NodePools(folder).remove_all()


@pytest.fixture
def holder(folder: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(folder)
    yield holder
    holder.kill()


@pytest.fixture
def place(holder: HolderProcess) -> Iterator[HolderPlace]:
    """This process as a replica."""
    place = open_place(holder.socket, CPU)
    yield place
    place.link.close()


StartUser = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_user(holder: HolderProcess) -> Iterator[StartUser]:
    """Start replicas in processes of their own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(what: str = "use") -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", USE, str(holder.socket), what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def held(
    place: HolderPlace, model: Path, *, dtype: torch.dtype = torch.float32, digest: str = "m"
) -> ModelWeights:
    return hold_weights(
        place, model, read_model_config(model), dtype=dtype, model_digest=digest, on_progress=lambda _: None
    )


def all_tensors(weights: ModelWeights) -> Iterator[torch.Tensor]:
    yield from (weights.embedding, weights.norm)
    assert isinstance(weights.head, torch.Tensor)
    yield weights.head
    for layer in weights.layers:
        values = (getattr(layer, field.name) for field in fields(LayerWeights))
        yield from (value for value in values if value is not None)


def assert_equals_the_models(weights: ModelWeights, model: Path, dtype: torch.dtype = torch.float32) -> None:
    config = read_model_config(model)
    own = load_weights(model, config, device=CPU, dtype=dtype, on_progress=lambda _: None)
    for ours, theirs in zip(all_tensors(weights), all_tensors(own), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_weights_equal_loaded_ones(place: HolderPlace, demo_model: Path, dtype: torch.dtype) -> None:
    assert_equals_the_models(held(place, demo_model, dtype=dtype), demo_model, dtype)


def test_second_replica_reads_nothing_of_the_model(
    holder: HolderProcess, place: HolderPlace, demo_model: Path, tmp_path: Path
) -> None:
    held(place, demo_model)
    bare = tmp_path / "model"
    bare.mkdir()
    (bare / "config.json").write_bytes((demo_model / "config.json").read_bytes())
    second = open_place(holder.socket, CPU)
    assert_equals_the_models(held(second, bare), demo_model)
    (copy,) = holder.weights()
    assert (copy.users, copy.state) == (2, "ready")
    second.link.close()


def test_models_types_and_digests_have_copies_of_their_own(
    holder: HolderProcess, place: HolderPlace, demo_model: Path
) -> None:
    held(place, demo_model)
    held(place, demo_model, dtype=torch.bfloat16)
    held(place, demo_model, digest="another")
    assert len({copy.name for copy in holder.weights()}) == 3


def test_replicas_that_start_together_fill_once(holder: HolderProcess, start_user: StartUser) -> None:
    users = [start_user() for _ in range(3)]
    assert len({read_line(user) for user in users}) == 1
    (copy,) = holder.weights()
    assert (copy.users, copy.state) == (3, "ready")


def test_who_waits_fills_when_the_one_that_filled_is_killed(
    holder: HolderProcess, start_user: StartUser
) -> None:
    first = start_user("stop")
    assert read_line(first) == b"half\n"
    second, third = start_user(), start_user()
    wait_until(lambda: _connections(holder) == 4)
    assert [copy.state for copy in holder.weights()] == ["fill"]
    first.send_signal(signal.SIGKILL)
    answers = {read_line(second), read_line(third)}
    assert len(answers) == 1
    assert b"ready {" in answers.pop()
    assert holder.users() == 2


def _connections(holder: HolderProcess) -> int:
    """Connections, this one among them."""
    link = patient_link(holder.socket)
    status, _ = link.ask(AskStatus(), Status)
    link.close()
    return status.connections


def test_scribbling_ends_the_scribbler_alone(holder: HolderProcess, start_user: StartUser) -> None:
    before = read_line(start_user())
    culprit = start_user("scribble")
    assert read_line(culprit) == before
    assert culprit.wait(20) == -signal.SIGSEGV
    assert read_line(start_user()) == before
    wait_until(lambda: holder.users() == 2)


def test_last_users_end_frees_the_weights(holder: HolderProcess, start_user: StartUser) -> None:
    users = [start_user() for _ in range(2)]
    for user in users:
        read_line(user)
    users[0].kill()
    wait_until(lambda: holder.users() == 1)
    users[1].kill()
    wait_until(lambda: holder.weights() == ())


def test_holders_death_takes_nothing_away_and_its_successor_is_filled_anew(
    folder: Path, holder: HolderProcess, place: HolderPlace, demo_model: Path
) -> None:
    weights = held(place, demo_model)
    holder.kill()
    assert_equals_the_models(weights, demo_model)
    successor = HolderProcess(folder)
    try:
        again = open_place(successor.socket, CPU)
        assert_equals_the_models(held(again, demo_model), demo_model)
        assert successor.users() == 1
        again.link.close()
    finally:
        successor.kill()


def test_copy_that_is_not_what_was_sealed_is_refused_and_made_anew(
    holder: HolderProcess, place: HolderPlace, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed with the checksum of something else, as if it had been written to after."""
    monkeypatch.setattr(holder_weights, "checksum_of", lambda memory: f"not-{checksum_of(memory)}")
    liar = open_place(holder.socket, CPU)
    held(liar, demo_model)
    monkeypatch.undo()
    assert_equals_the_models(held(place, demo_model), demo_model)
    ready = [copy for copy in holder.weights() if copy.users]
    assert len(ready) == 2, "who uses the bad copy keeps it"
    liar.link.close()
    wait_until(lambda: len(holder.weights()) == 1)


def test_model_that_changes_while_it_is_read_is_refused(
    holder: HolderProcess, place: HolderPlace, demo_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)

    def touch(_ratio: float) -> None:
        os.utime(model / "model.safetensors", ns=(1, 1))

    with pytest.raises(WeightsError, match="changed while they were read"):
        hold_weights(
            place, model, read_model_config(model), dtype=torch.float32, model_digest="m", on_progress=touch
        )
    wait_until(lambda: holder.weights() == ())


def test_device_that_is_full_is_told_and_a_lingering_copy_gives_way(
    folder: Path, holder: HolderProcess, demo_model: Path
) -> None:
    holder.kill()
    size = (demo_model / "model.safetensors").stat().st_size
    small = HolderProcess(folder, linger_seconds=3600, limit_bytes=int(size * 1.5))
    try:
        first, second = open_place(small.socket, CPU), open_place(small.socket, CPU)
        held(first, demo_model)
        with pytest.raises(OSError, match="bytes are wanted"):
            held(second, demo_model, digest="another")
        first.link.close()
        wait_until(lambda: small.users() == 0)
        (copy,) = small.weights()
        assert copy.state == "ready", "it lingers"
        third = open_place(small.socket, CPU)
        held(third, demo_model, digest="another")
        (copy,) = small.weights()
        assert copy.users == 1
        third.link.close()
    finally:
        small.kill()


def test_only_who_fills_seals_and_only_who_uses_rejects(holder: HolderProcess) -> None:
    filler, other = patient_link(holder.socket), patient_link(holder.socket)
    answer, descriptors = filler.ask(OpenWeights("w", 10_000), Weights)
    close_all(descriptors)
    assert (answer.state, answer.size_bytes) == ("fill", 12_288)
    for request, reason in (
        (SealWeights("w", "abc"), "only who fills"),
        (RejectWeights("w"), "only who uses"),
        (SealWeights("none", "abc"), "only who fills"),
    ):
        with pytest.raises(OSError, match=reason):
            other.ask(request, Done)
    with pytest.raises(OSError, match="with a checksum"):
        filler.ask(SealWeights("w", ""), Done)
    filler.ask(SealWeights("w", "abc"), Done)
    with pytest.raises(OSError, match="have 12288 bytes here"):
        other.ask(OpenWeights("w", 4096), Weights)
    filler.close()
    other.close()


def test_holder_of_another_device_is_not_used(holder: HolderProcess) -> None:
    place = open_place(holder.socket, CPU)
    with pytest.raises(OSError, match="No such file"):
        open_place(holder.socket.with_name("nobody"), CPU)
    place.link.close()
    if not torch.cuda.is_available():
        with pytest.raises(OSError, match="no NVIDIA driver here"):
            open_place(holder.socket, torch.device("cuda"))


def test_checksum_depends_on_every_byte_and_its_place() -> None:
    memory = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    sums = {checksum_of(memory)}
    for at in (0, 8, 4095 * 8, 32767):
        changed = memory.clone()
        changed[at] += 1
        sums.add(checksum_of(changed))
    swapped = memory.clone()
    swapped[:8], swapped[8:16] = memory[8:16], memory[:8]
    sums.add(checksum_of(swapped))
    assert len(sums) == 6


def complete(engine: EngineProcess) -> str:
    body = {"model": "demo", "prompt": "One ring to rule them all", "max_tokens": 12, "temperature": 0}
    with engine.client() as client:
        answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


def test_engines_serve_from_one_holders_weights_and_blocks(
    folder: Path, holder: HolderProcess, demo_model: Path, tmp_path: Path
) -> None:
    with engine_starter(tmp_path, kv_pool_dir=folder, holder=holder.socket) as start:
        first, second = (start("torch", demo_model, num_blocks=64) for _ in range(2))
        first.wait_ready()
        second.wait_ready()
        (copy,) = holder.weights()
        assert copy.users == 2
        (status,) = NodePools(folder).status()
        assert {row.replica_id for row in status.members} == {"r0", "r1"}
        expected = complete(first)
        assert complete(second) == expected
        first.process.kill()
        first.process.wait(60)
        NodePools(folder).sweep({"r0", "r1"})
        wait_until(lambda: holder.users() == 1)
        assert complete(second) == expected
        holder.kill()
        assert complete(second) == expected, "a holder's end disturbs nobody"


def test_engine_whose_holder_is_gone_has_memory_of_its_own_and_says_why(
    folder: Path, demo_model: Path, tmp_path: Path
) -> None:
    with engine_starter(tmp_path, kv_pool_dir=folder, holder=folder / "nobody") as start:
        engine = start("torch", demo_model, num_blocks=64)
        engine.wait_ready()
        complete(engine)
        assert "KV memory is this replica's alone: [Errno 2]" in engine.log()
        assert "weights are not with the holder: [Errno 2]" in engine.log()
