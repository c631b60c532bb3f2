"""What was compiled elsewhere lies in an engine's cache before it is launched, and never in anybody's way."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.fakes.node import Node, make_home, wait_for
from tests.fakes.valkey import running_valkey
from tests.fakes.weights import Weights, folder_source, weights_of
from workers.agent.engine_caches import EngineCaches
from workers.protocol import manifest, v1
from workers.protocol.weights import WeightsWanted

CONTENTS = {"inductor/ab/kernel.so": b"code" * 1000, "triton/k.json": b"{}", "empty": b""}


@pytest.fixture
def compiled() -> Weights:
    return weights_of(CONTENTS)


def caches(root: Path, compiled: Weights, ready: Path | None, engine: str = "torch") -> EngineCaches:
    wanted = (compiled.wanted(engine_cache=engine),)
    return EngineCaches(root, ("torch",), wanted=lambda: wanted, ready_folder=lambda _: ready)


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_an_agent_fetches_verifies_and_puts_files_where_its_engine_looks(
    tmp_path: Path, compiled: Weights
) -> None:
    with running_valkey(tmp_path) as valkey:
        home = make_home(tmp_path / "home", valkey.url)
        node = Node(home, valkey, {"EXAOPS_AGENT_WEIGHTS_MARGIN_BYTES": "0"})
        with valkey.client() as client:
            client.set(manifest.key_of(compiled.digest), compiled.body)
        node.start()
        try:
            engine = next(iter(engines_of(node)))
            source = folder_source(compiled.write_to(tmp_path / "origin"))
            send(node, compiled.wanted(source, engine_cache=engine))
            cache = home.engine_cache / engine
            wait_for(lambda: files_in(cache) == CONTENTS, "the files")
        finally:
            node.close()


def engines_of(node: Node) -> tuple[str, ...]:
    hellos = wait_for(lambda: node.all(v1.Hello), "a hello")
    return tuple(hellos[-1].engines)


def send(node: Node, wanted: WeightsWanted) -> None:
    node.send(
        v1.ApplyWeights(
            command_id=str(uuid.uuid4()), lease_epoch=1, deadline_seconds=60, revision=1, weights=(wanted,)
        )
    )


def test_files_that_an_engine_has_already_stay_and_others_may_be_written_by_it(
    tmp_path: Path, compiled: Weights
) -> None:
    ready, root = compiled.write_to(tmp_path / "ready"), tmp_path / "caches"
    own = root / "torch" / "triton" / "k.json"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"its own")
    assert caches(root, compiled, ready).step() == 2
    assert files_in(root / "torch") == CONTENTS | {"triton/k.json": b"its own"}
    kernel = root / "torch" / "inductor" / "ab" / "kernel.so"
    kernel.write_bytes(b"compiled anew")
    assert (ready / "inductor/ab/kernel.so").read_bytes() == CONTENTS["inductor/ab/kernel.so"], "a copy"


def test_it_is_done_once_and_again_for_other_files(tmp_path: Path, compiled: Weights) -> None:
    ready, root = compiled.write_to(tmp_path / "ready"), tmp_path / "caches"
    assert caches(root, compiled, ready).step() == 3
    (root / "torch" / "empty").unlink()
    assert caches(root, compiled, ready).step() == 0, "an engine may tidy its cache"
    other = weights_of({"triton/new.json": b"1"})
    assert caches(root, other, other.write_to(tmp_path / "other")).step() == 1


def test_what_is_not_here_yet_and_engines_that_are_not_known_put_nothing_anywhere(
    tmp_path: Path, compiled: Weights
) -> None:
    ready, root = compiled.write_to(tmp_path / "ready"), tmp_path / "caches"
    assert caches(root, compiled, None).step() == 0
    for engine in ("", "..", "../..", "sglang"):
        assert caches(root, compiled, ready, engine).step() == 0
    assert not root.exists()


def test_a_copy_that_broke_off_is_made_again_whole(tmp_path: Path, compiled: Weights) -> None:
    ready, root = compiled.write_to(tmp_path / "ready"), tmp_path / "caches"
    # Where a folder is to be there is a file: the copy stops there.
    (root / "torch").mkdir(parents=True)
    (root / "torch" / "triton").write_bytes(b"in the way")
    with pytest.raises(OSError, match="triton"):
        caches(root, compiled, ready).step()
    (root / "torch" / "triton").unlink()
    assert caches(root, compiled, ready).step() == 1
    assert files_in(root / "torch") == CONTENTS
    assert not list(root.rglob("*.part"))
