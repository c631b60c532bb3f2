"""Pieces from node to node over real sockets: whole and right for all, whatever one of them does."""

from __future__ import annotations

import errno
import random
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.fakes.swarm_nodes import (
    BRISK,
    KEY,
    PIECE,
    MemoryOrigin,
    SwarmNode,
    from_origin,
    nodes_of,
    row_of,
    wait_for,
)
from workers.weights.swarm import passes, wire
from workers.weights.swarm.parents import Parent
from workers.weights.swarm.pieces import Piece, PieceRow, to_map
from workers.weights.swarm.pulling import Stage
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm.serving import PieceServer, ServeLimits

_random = random.Random(7)  # noqa: S311 - the same bytes in every run
CONTENTS = {
    "model.safetensors": _random.randbytes(PIECE * 21 + 100),
    "tokenizer.json": _random.randbytes(5000),
    "kernels/cache.bin": _random.randbytes(PIECE * 3),
    "empty.txt": b"",
}


@pytest.fixture
def row() -> PieceRow:
    return row_of(CONTENTS)


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin(CONTENTS)


def total() -> int:
    return sum(map(len, CONTENTS.values()))


def chain(nodes: list[SwarmNode]) -> None:
    """Both stripes along the row of nodes, one of them backwards."""
    plans: dict[str, list[list[Parent]]] = {node.name: [] for node in nodes}
    for order in (nodes, nodes[::-1]):
        for place, node in enumerate(order):
            above = [other.parent for other in reversed(order[:place])]
            plans[node.name].append(above or [from_origin()])
    for node in nodes:
        node.member.follow(plans[node.name])


def all_whole(nodes: list[SwarmNode]) -> bool:
    return all(node.member.status().whole for node in nodes)


def test_every_node_gets_all_files_and_the_origin_gives_one_copy(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(4, row, tmp_path, origin) as nodes:
        chain(nodes)
        wait_for(lambda: all_whole(nodes), "whole nodes")
        assert [node.contents() for node in nodes] == [CONTENTS] * 4
        assert origin.sent_bytes == total()
        assert all(sorted(node.sink.written) == list(range(row.count)) for node in nodes), "nothing twice"
        wait_for(lambda: all(p.stage is Stage.DONE for n in nodes for p in n.member.status().pulls), "ends")


def test_a_piece_is_passed_on_before_the_next_has_come(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(2, row, tmp_path, origin) as (first, last):
        origin.gate.clear()
        first.member.follow([[from_origin()]])
        last.member.follow([[first.parent]])
        wait_for(lambda: bool(first.server.streams()), "a stream")
        for index in range(5):
            piece = row.piece(index)
            content = memoryview(CONTENTS[piece.path])[piece.offset : piece.offset + piece.length]
            first.sink.write(piece, content)
            first.member.board.add(index)
            wait_for(lambda: last.member.board.have == index + 1, "the piece", 10.0)  # noqa: B023 - at once
        assert first.member.board.have == 5
        origin.gate.set()
        wait_for(lambda: all_whole([first, last]), "whole nodes")
        assert last.contents() == CONTENTS


def test_damaged_pieces_are_refused_and_who_sends_them_is_struck_out(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as (good, bad, child):
        good.member.follow([[from_origin()]])
        bad.sink.spoils = lambda piece: piece.index % 2 == 0
        bad.member.follow([[good.parent]])
        wait_for(lambda: all_whole([good, bad]), "whole parents")
        child.member.follow([[bad.parent, good.parent]])
        wait_for(lambda: all_whole([child]), "a whole child")
        assert child.contents() == CONTENTS
        assert child.member.status().standings["n1"].bad_pieces == BRISK.strikes


def test_an_origin_of_damaged_bytes_is_left_after_a_few_and_nothing_of_it_is_kept(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    origin.damages = True
    with nodes_of(1, row, tmp_path, origin) as (node,):
        node.member.follow([[from_origin()]])
        wait_for(lambda: node.member.status().standings.get("origin", None) is not None, "a verdict")
        wait_for(lambda: node.member.status().standings["origin"].bad_pieces >= BRISK.strikes, "strikes")
        wait_for(lambda: node.member.status().pulls[0].stage is Stage.WAITING, "the end of asking")
        sent = origin.sent_bytes
        assert sent <= PIECE * BRISK.strikes
        assert node.sink.written == []
        assert "damaged" in node.member.status().pulls[0].why


def test_a_parent_that_dies_is_replaced_by_the_next_at_once(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as (root, middle, leaf):
        origin.gate.clear()
        root.member.follow([[from_origin()]])
        middle.member.follow([[root.parent]])
        leaf.member.follow([[middle.parent, root.parent]])
        wait_for(lambda: bool(middle.server.streams()), "a stream")
        middle.stop()
        origin.gate.set()
        wait_for(lambda: all_whole([root, leaf]), "whole nodes")
        assert leaf.contents() == CONTENTS


def test_a_parent_that_falls_silent_is_left(row: PieceRow, origin: MemoryOrigin, tmp_path: Path) -> None:
    mute = socket.create_server(("127.0.0.1", 0))
    with mute, nodes_of(2, row, tmp_path, origin) as (root, leaf):
        root.member.follow([[from_origin()]])
        leaf.member.follow([[Parent("mute", "127.0.0.1", mute.getsockname()[1]), root.parent]])
        wait_for(lambda: all_whole([leaf]), "a whole node")
        assert leaf.member.status().standings["mute"].failures >= 1


def test_a_parent_that_never_gets_anything_new_is_left(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as (root, stuck, leaf):
        root.member.follow([[from_origin()]])
        leaf.member.follow([[stuck.parent, root.parent]])
        wait_for(lambda: all_whole([leaf]), "a whole node")
        assert "nothing new" in leaf.member.status().standings["n1"].why


def test_a_full_disk_ends_this_nodes_part_with_a_clear_word_and_no_other(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as nodes:
        full = OSError(errno.ENOSPC, "No space left on device")
        nodes[1].sink.fails = lambda piece: full if piece.index > 3 else None
        nodes[0].member.follow([[from_origin()]])
        nodes[1].member.follow([[nodes[0].parent]])
        nodes[2].member.follow([[nodes[1].parent, nodes[0].parent]])
        wait_for(lambda: bool(nodes[1].member.status().failure), "a failure")
        assert "No space left" in nodes[1].member.status().failure
        assert nodes[1].member.status().have_pieces == 4
        wait_for(lambda: all_whole([nodes[0], nodes[2]]), "the others")


def test_a_node_goes_on_with_what_it_has(row: PieceRow, origin: MemoryOrigin, tmp_path: Path) -> None:
    with nodes_of(1, row, tmp_path / "before", origin) as (before,):
        before.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([before]), "a whole node")
    sent, kept = origin.sent_bytes, range(0, row.count, 2)
    again = SwarmNode("n0", row, tmp_path / "before" / "n0", origin=origin, present=kept)
    try:
        again.member.follow([[from_origin()], [from_origin()]])
        wait_for(lambda: all_whole([again]), "a whole node")
        assert origin.sent_bytes - sent == total() - sum(row.piece(i).length for i in kept)
    finally:
        again.stop()


def test_a_new_plan_is_followed_while_pieces_are_on_their_way(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as (root, old, leaf):
        leaf.member.follow([[old.parent]])
        wait_for(lambda: bool(old.server.streams()), "a stream")
        root.member.follow([[from_origin()]])
        leaf.member.follow([[root.parent]])
        wait_for(lambda: all_whole([leaf]), "a whole node")
        wait_for(lambda: not old.server.streams(), "the end of what was asked before")


def test_the_origin_is_asked_unplanned_only_after_patience_and_when_it_is_named(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    closed = Parent("gone", "127.0.0.1", 9)
    with nodes_of(2, row, tmp_path, origin) as (may, may_not):
        may_not.member.follow([[closed]])
        may.member.follow([[closed, from_origin()]])
        wait_for(lambda: all_whole([may]), "a whole node")
        assert may_not.member.status().have_pieces == 0
        assert origin.sent_bytes == total()


def test_a_busy_parent_is_no_bad_one_and_is_asked_again(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin, serves=ServeLimits(streams=1)) as (root, one, two):
        one.member.follow([[root.parent]])
        wait_for(lambda: bool(root.server.streams()), "a stream")
        two.member.follow([[root.parent]])
        wait_for(lambda: "streams are taken" in two.member.status().pulls[0].why, "a refusal")
        assert two.member.status().standings["n0"].bad_pieces == 0
        root.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([one, two]), "whole nodes")


def test_many_children_of_a_busy_parent_all_get_their_turn(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(9, row, tmp_path, origin, serves=ServeLimits(streams=2)) as (root, *children):
        root.member.follow([[from_origin()]])
        for child in children:
            child.member.follow([[root.parent]])
        wait_for(lambda: all_whole([root, *children]), "whole nodes", 60.0)
        assert all(child.member.status().standings["n0"].bad_pieces == 0 for child in children)
        assert origin.sent_bytes == total()


def test_files_of_another_revision_of_one_name_and_size_are_never_taken_for_these(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    changed = CONTENTS | {"model.safetensors": CONTENTS["model.safetensors"][::-1]}
    other_row, other_origin = row_of(changed), MemoryOrigin(changed)
    with (
        nodes_of(1, other_row, tmp_path / "other", other_origin) as (other,),
        nodes_of(2, row, tmp_path / "these", origin) as (liar, child),
    ):
        other.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([other]), "a whole node")
        # Its node is asked for these weights: it knows of none.
        child.member.follow([[Parent("n0", "127.0.0.1", other.server.port)]])
        wait_for(lambda: "403" in child.member.status().standings["n0"].why, "a refusal")
        assert child.member.board.have == 0
        # And one that has the other files on its disk, and takes them for these.
        shutil.rmtree(liar.sink.folder)
        shutil.copytree(other.sink.folder, liar.sink.folder)
        liar.member.board.add_all(range(row.count))
        child.member.follow([[liar.parent, from_origin()]])
        wait_for(lambda: all_whole([child]), "a whole child")
        assert child.contents() == CONTENTS


def test_a_parent_whose_disk_lost_pieces_is_left_and_not_asked_for_ever(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(3, row, tmp_path, origin) as (good, poor, child):
        for node in (good, poor):
            node.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([good, poor]), "whole parents")
        (poor.sink.folder / "model.safetensors").unlink()
        (poor.sink.folder / "kernels/cache.bin").write_bytes(b"short")
        child.member.follow([[poor.parent, good.parent]])
        wait_for(lambda: all_whole([child]), "a whole child")
        assert child.contents() == CONTENTS
        assert child.member.status().standings["n1"].failures >= 1


def test_an_origin_that_goes_in_the_middle_is_waited_for_and_asked_for_the_rest_only(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(2, row, tmp_path, origin) as (root, leaf):

        def goes_away(piece: Piece) -> None:
            origin.away = origin.away or piece.index == 7

        root.sink.fails = goes_away
        root.member.follow([[from_origin()]])
        leaf.member.follow([[root.parent]])
        wait_for(lambda: "origin" in root.member.status().pulls[0].why, "the loss")
        wait_for(lambda: leaf.member.board.have == root.member.board.have, "all that there is")
        assert not leaf.member.status().whole
        root.sink.fails = lambda _: None
        origin.away = False
        wait_for(lambda: all_whole([root, leaf]), "whole nodes")
        assert origin.sent_bytes <= total() + PIECE, "what had come did not come again"


def test_what_a_node_gives_and_what_it_takes_in_is_capped(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(2, row, tmp_path, origin, serves=ServeLimits(bytes_per_second=4e6)) as (root, leaf):
        root.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([root]), "a whole root")
        leaf.member.follow([[root.parent]])
        wait_for(lambda: all_whole([leaf]), "a whole leaf")
        stream_seconds = leaf.member.status().pulls[0].wire_seconds
        assert stream_seconds >= total() / 4e6 * 0.5, "a cap can only make it slower"
        slow = SwarmNode("slow", row, tmp_path / "slow", caps=(RateCap(2e6),))
        try:
            began = time.monotonic()
            slow.member.follow([[leaf.parent]])
            wait_for(lambda: all_whole([slow]), "a whole node")
            assert time.monotonic() - began >= total() / 2e6 * 0.5, "a cap can only make it slower"
            assert slow.contents() == CONTENTS
        finally:
            slow.stop()


def test_a_stream_that_the_parents_cap_holds_back_says_so(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(2, row, tmp_path, origin, serves=ServeLimits(stream_bytes_per_second=1e5)) as (root, leaf):
        root.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([root]), "a whole root")
        leaf.member.follow([[root.parent]])
        wait_for(lambda: any(s.capped_ratio > 0.5 for s in root.server.streams()), "a capped stream")


def ask(node: SwarmNode, *, signature: str, body: bytes, path: str) -> int:
    """Status of an answer; 0 for a closed connection."""
    with socket.create_connection(("127.0.0.1", node.server.port), 5.0) as sock:
        head = f"POST {path} HTTP/1.1\r\nAuthorization: {signature}\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        answer = sock.recv(100)
    return int(answer.split()[1]) if answer else 0


def test_without_a_valid_signature_nobody_gets_anything(
    row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    path, body = wire.path_of(row.name), to_map(range(row.count), row.map_bytes)
    with nodes_of(1, row, tmp_path, origin) as (node,):
        node.member.follow([[from_origin()]])
        wait_for(lambda: all_whole([node]), "a whole node")
        ring, foreign = passes.KeyRing(), passes.KeyRing()
        ring.put(1, KEY, 60.0)
        foreign.put(1, b"x" * 32, 60.0)
        asked = passes.Asked("POST", path, body)
        good = ring.sign(asked, child="n9", parent="n0")
        refused = [
            "",
            "Bearer " + "0" * 64,
            foreign.sign(asked, child="n9", parent="n0"),
            ring.sign(asked, child="n9", parent="n1"),
            ring.sign(passes.Asked("POST", path + "x", body), child="n9", parent="n0"),
            ring.sign(passes.Asked("POST", path, bytes(row.map_bytes)), child="n9", parent="n0"),
            good.replace("node=n9", "node=n8"),
        ]
        assert [ask(node, signature=s, body=body, path=path) for s in refused] == [403] * len(refused)
        assert ask(node, signature=good, body=body, path=wire.path_of("sha256:" + "0" * 64)) in (0, 403)
        assert ask(node, signature=good, body=body, path=path) == 200
        assert ask(node, signature=good, body=body, path=path) == 403, "a request is taken once"


def test_keys_end_on_the_clock_of_who_holds_them() -> None:
    now = [0.0]
    ring = passes.KeyRing(clock=lambda: now[0])
    asked = passes.Asked("POST", "/x", b"")
    ring.put(1, KEY, 10.0)
    signed = ring.sign(asked, child="a", parent="b")
    now[0] = 10.0
    with pytest.raises(passes.NotAllowedError, match="does not hold"):
        ring.check(signed, asked, parent="b")
    with pytest.raises(passes.NotAllowedError, match="no valid key"):
        ring.sign(asked, child="a", parent="b")


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])  # noqa: S104 - they are refused
def test_pieces_are_never_served_on_every_address(address: str) -> None:
    with pytest.raises(ValueError, match="not on all of them"):
        PieceServer("n", address)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST /weights/x/pieces HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /weights/x/pieces HTTP/1.1\r\nContent-Length: 9999999999999\r\n\r\n",
        b"POST /weights/x/pieces HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"A" * 20_000,
    ],
)
def test_what_is_no_request_closes_the_connection_and_nothing_else(
    sent: bytes, row: PieceRow, origin: MemoryOrigin, tmp_path: Path
) -> None:
    with nodes_of(2, row, tmp_path, origin) as (root, leaf):
        with socket.create_connection(("127.0.0.1", root.server.port), 5.0) as sock:
            sock.sendall(sent)
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        root.member.follow([[from_origin()]])
        leaf.member.follow([[root.parent]])
        wait_for(lambda: all_whole([leaf]), "a whole leaf")
