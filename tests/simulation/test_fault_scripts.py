"""Fault scripts: read strictly, decided by the seed, and seen by whoever reads the reports."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from workers.simulation import faults
from workers.simulation.faults import FaultScriptError, Place, choose_targets, parse_fault, read_script

PLACES = [Place(f"n{number:02d}", f"rack-{number % 4}") for number in range(20)]


def targets(fault: faults.Fault, seed: int = 1) -> tuple[str, ...]:
    return choose_targets(fault, PLACES, random.Random(seed))  # noqa: S311 - a model


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("node-death@30s", faults.NodeDeath(at_seconds=30)),
        ("partition@500ms+1m:share=0.25", faults.Partition(at_seconds=0.5, for_seconds=60, share=0.25)),
        ("rack-loss@2m:racks=rack-1;rack-2", faults.RackLoss(at_seconds=120, racks=("rack-1", "rack-2"))),
        (
            "flapping@5:nodes=n01,down_seconds=3,up_seconds=4",
            faults.Flapping(at_seconds=5, nodes=("n01",), down_seconds=3, up_seconds=4),
        ),
        ("clock-jump@1s:offset_seconds=-600", faults.ClockJump(at_seconds=1, offset_seconds=-600)),
        ("report-loss@0s:loss_ratio=0.1", faults.ReportLoss(loss_ratio=0.1)),
    ],
)
def test_one_word_says_a_fault(word: str, fault: faults.Fault) -> None:
    assert parse_fault(word) == fault


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("earthquake@3s", "Invalid value 'earthquake'"),
        ("node-death", "write it as"),
        ("node-death@soon", "no duration"),
        ("node-death@3s:share=1.5", "share must be from 0 to 1"),
        ("node-death@3s:speed=3", "unknown field"),
        ("report-loss@3s:loss_ratio=2", "loss_ratio"),
        ("slow-node@3s:latency_factor=0.5", "at least 1"),
        ("flapping@3s:down_seconds=0", "must be positive"),
    ],
)
def test_nonsense_is_refused_with_what_is_wrong(word: str, why: str) -> None:
    with pytest.raises(FaultScriptError, match=why):
        parse_fault(word)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.toml", '[[fault]]\nkind = "rack-loss"\nat_seconds = 30\nracks = ["rack-1"]\n'),
        ("s.json", '{"fault": [{"kind": "rack-loss", "at_seconds": 30, "racks": ["rack-1"]}]}'),
    ],
)
def test_script_is_read_from_toml_and_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_script(tmp_path / name) == (faults.RackLoss(at_seconds=30, racks=("rack-1",)),)


def test_script_with_a_typing_error_names_file_and_place(tmp_path: Path) -> None:
    script = tmp_path / "s.toml"
    script.write_text('[[fault]]\nkind = "node-death"\nat_secnods = 30\n')
    with pytest.raises(FaultScriptError, match=r"s\.toml.*at_secnods"):
        read_script(script)


def test_seed_chooses_the_target_and_nothing_else_does() -> None:
    death = faults.NodeDeath()
    assert targets(death, 1) == targets(death, 1)
    assert len({targets(death, seed) for seed in range(20)}) > 3
    assert all(len(targets(death, seed)) == 1 for seed in range(20))


def test_targets_are_named_racks_named_nodes_or_a_share() -> None:
    assert targets(faults.RackLoss(racks=("rack-2",))) == ("n02", "n06", "n10", "n14", "n18")
    assert targets(faults.Partition(nodes=("n03", "n01"))) == ("n01", "n03")
    assert len(targets(faults.NodeDeath(share=0.25))) == 5
    assert len(targets(faults.RackLoss())) == 5
    assert len(targets(faults.MassSilence())) == len(PLACES)


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(FaultScriptError, match="no such node: n99"):
        targets(faults.NodeDeath(nodes=("n99",)))
    with pytest.raises(FaultScriptError, match="no such rack: rack-9"):
        targets(faults.RackLoss(racks=("rack-9",)))
