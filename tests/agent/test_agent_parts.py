"""The agent's smaller parts: commands, journal, probing, logs, probes, settings."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.node import make_home, make_spec
from workers.agent import logs
from workers.agent.commands import CommandDesk, Reactions
from workers.agent.config import AgentConfig, ConfigError, load_config
from workers.agent.home import Home, HomeError, HomeLock
from workers.agent.join import JoinError, check_url
from workers.agent.journal import AttemptRow, Journal
from workers.agent.ports import NoPortError, PortRange, choose_ports
from workers.agent.probing import Answer, Outcome, ProbeState, advance
from workers.agent.redis_link import kombu_url
from workers.agent.supervisor import Close, Ending, Probe
from workers.agent.tail import LogFollower, fit
from workers.engines.base import EngineSample
from workers.probes.accelerators import cpu_accelerator, discover
from workers.probes.host import HostProbe
from workers.protocol import v1
from workers.protocol.wish import ReplicaSpec


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite3")
    yield journal
    journal.close()


class Desk:
    """A command desk, and what it set in motion."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.identity = make_home(folder).load_identity()
        self.journal = journal
        self.reports: list[v1.Report] = []
        self.hellos = self.wakes = 0
        reactions = Reactions(
            self._wake, self._hello, self.reports.append, lambda _: "", lambda _: None, *[lambda _: ""] * 4
        )
        self.desk = CommandDesk(self.identity.node_id, self.identity.key, journal, reactions)

    def _wake(self) -> None:
        self.wakes += 1

    def _hello(self) -> None:
        self.hellos += 1

    def take(self, command: v1.Command, key: bytes | None = None) -> str:
        data = v1.encode_command(command, node_id=self.identity.node_id, node_key=key or self.identity.key)
        return self.desk.take(data)


@pytest.fixture
def desk(tmp_path: Path, journal: Journal) -> Desk:
    return Desk(tmp_path / "home", journal)


def desired(number: int, *specs: ReplicaSpec, epoch: int = 1, revision: int = 1) -> v1.ApplyDesired:
    return v1.ApplyDesired(
        command_id=f"c-{number}",
        lease_epoch=epoch,
        deadline_seconds=60,
        revision=revision,
        replicas=specs,
    )


def test_older_lease_epoch_is_refused(desk: Desk) -> None:
    assert desk.take(desired(1, epoch=5)) == "done"
    assert desk.take(desired(2, make_spec("r"), epoch=4, revision=9)).startswith("refused")
    wish = desk.journal.wish()
    assert wish is not None
    assert (wish.lease_epoch, wish.revision, wish.specs) == (5, 1, ())


def test_older_revision_changes_nothing_but_the_newer_lease_counts(desk: Desk) -> None:
    desk.take(desired(1, make_spec("r"), revision=7))
    assert desk.take(desired(2, epoch=2, revision=6)).startswith("done")
    wish = desk.journal.wish()
    assert wish is not None
    assert (wish.lease_epoch, wish.revision, len(wish.specs)) == (2, 7, 1)


def test_same_wish_again_is_a_canary_and_not_reported(desk: Desk) -> None:
    desk.take(desired(1, make_spec("r")))
    assert desk.take(desired(2, make_spec("r"))) == "done"
    assert len(desk.reports) == 1
    assert desk.wakes == 1


def test_command_delivered_twice_is_answered_twice_and_done_once(desk: Desk) -> None:
    hello = v1.RequestHello(command_id="h", lease_epoch=0, deadline_seconds=5, reason="expired")
    assert [desk.take(hello), desk.take(hello)] == ["done", "done"]
    assert desk.hellos == 1
    assert len(desk.reports) == 2


def test_forged_and_malformed_commands_are_refused(desk: Desk) -> None:
    assert "seal" in desk.take(desired(1, make_spec("r")), key=b"x" * 32)
    assert desk.desk.take(b"").startswith("refused")
    assert desk.journal.wish() is None


@pytest.mark.parametrize("replica_id", ["../../etc", "a/b", "", ".hidden", "x" * 200])
def test_replica_id_that_is_no_file_name_is_refused(desk: Desk, replica_id: str) -> None:
    assert desk.take(desired(1, make_spec(replica_id))).startswith("refused")


def test_wanted_replica_is_not_forgotten(desk: Desk) -> None:
    desk.take(desired(1, make_spec("r1")))
    forget = v1.ForgetReplica(command_id="f", lease_epoch=1, deadline_seconds=5, replica_ids=("r1", "gone"))
    assert desk.take(forget) == "failed: still wanted or not gone: r1"


# -- journal -------------------------------------------------------------------------------------
def attempt_row(replica_id: str, *ports: int) -> AttemptRow:
    return AttemptRow(
        replica_id=replica_id,
        attempt=1,
        generation=1,
        launch_digest="d",
        engine="tiny",
        ports=ports,
        host="127.0.0.1",
        runtime_dir="/nowhere",
        log_file="/nowhere.log",
        launched_at=1.0,
        pid=1234,
        start_ticks=99,
    )


def test_port_is_leased_once_and_a_refused_lease_leaves_nothing(journal: Journal) -> None:
    journal.open_attempt(attempt_row("r1", 41_000))
    with pytest.raises(sqlite3.IntegrityError):
        journal.open_attempt(attempt_row("r2", 41_001, 41_000))
    assert journal.leased_ports() == {41_000}
    assert [row.replica_id for row in journal.attempts()] == ["r1"]
    assert journal.find_replica("r2") is None


def test_journal_outlives_its_process(tmp_path: Path, journal: Journal) -> None:
    journal.open_attempt(attempt_row("r1", 41_000))
    journal.save_outcome("c", "done", "")
    again = Journal(tmp_path / "journal.sqlite3")  # the first one is still open, as after kill -9
    assert again.attempts() == journal.attempts()
    assert again.find_outcome("c") == ("done", "")
    again.close()


def test_reboot_of_the_machine_voids_pids_and_times(journal: Journal) -> None:
    assert not journal.note_boot("one", now=5.0)
    journal.open_attempt(attempt_row("r1", 41_000))
    journal.change_attempt(("r1", 1), pid=4, start_ticks=5, ready_at=90_000.0, kill_sent_at=90_001.0)
    assert not journal.note_boot("one", now=6.0)
    assert journal.note_boot("two", now=7.0)
    (row,) = journal.attempts()
    assert (row.leader, row.launched_at, row.ready_at, row.kill_sent_at) == (None, 0.0, None, None)
    assert row.stop_reason == "the machine was restarted"


def test_reboot_keeps_the_count_of_crashes_and_waits_the_back_off_out_anew(journal: Journal) -> None:
    journal.note_boot("one", now=5.0)
    for name, crashes in (("broken", 4), ("sound", 0)):
        row = attempt_row(name, 41_000 + crashes)
        journal.open_attempt(row)
        ending = Ending.CRASHED if crashes else Ending.STOPPED
        close = Close(name, row.attempt, ending, crashes, 0, "exit code 2")
        journal.close_attempt(close, exit_record=None, log_tail=(), now=90_000.0)
    journal.note_boot("two", now=7.0)
    kept = {row.replica_id: (row.crashes, row.last_ended_at) for row in journal.replicas()}
    assert kept == {"broken": (4, 7.0), "sound": (0, None)}


# -- probing -------------------------------------------------------------------------------------
READY = Outcome(Answer.READY, sample=EngineSample(requests_running=0))


def steps(*answers: Outcome | Answer, window_seconds: float = 10.0) -> ProbeState:
    state = ProbeState()
    for second, answer in enumerate(answers):
        outcome = answer if isinstance(answer, Outcome) else Outcome(answer)
        state = advance(state, outcome, now=float(second), window_seconds=window_seconds)
    return state


def test_closed_then_loading_then_ready() -> None:
    assert steps(Answer.CLOSED).probe is Probe.CLOSED
    assert steps(Answer.CLOSED, Answer.NOT_READY).probe is Probe.LOADING
    assert steps(Answer.CLOSED, Answer.NOT_READY, READY).ready_at_seconds == 2.0


def test_three_failures_in_a_row_end_readiness_and_one_success_restores_it() -> None:
    assert steps(READY, Answer.CLOSED, Answer.CLOSED).probe is Probe.READY
    assert steps(READY, Answer.CLOSED, READY, Answer.CLOSED, Answer.CLOSED).probe is Probe.READY
    lost = steps(READY, *[Answer.CLOSED] * 3)
    assert lost.probe is Probe.DEAD
    assert steps(READY, *[Answer.CLOSED] * 3, READY).probe is Probe.READY


def test_late_answers_of_a_ready_engine_mean_busy_and_never_dead() -> None:
    state = steps(READY, *[Answer.TIMEOUT] * 50)
    assert (state.probe, state.note) == (Probe.READY, "busy: health answered late")


def test_window_keeps_one_sample_from_before_it() -> None:
    state = steps(*[READY] * 60, window_seconds=10.0)
    assert state.samples[0][0] == 49.0
    assert state.samples[-1][0] == 59.0


# -- ports ---------------------------------------------------------------------------------------
@given(st.text(max_size=20), st.integers(1, 500))
def test_walk_visits_every_port_once(seed: str, size: int) -> None:
    walked = list(PortRange(20_000, 20_000 + size - 1).walk(seed))
    assert sorted(walked) == list(range(20_000, 20_000 + size))


def test_used_up_range_is_said_so() -> None:
    with pytest.raises(NoPortError, match="2001"):
        choose_ports([1], ports=PortRange(2001, 2001), seed="", leased={2001}, host="127.0.0.1")


def test_ports_of_one_purpose_lie_in_a_row_around_what_is_leased_or_taken() -> None:
    host = "127.83.19.4"  # nothing else of this machine listens there
    with socket.socket() as taken:
        taken.bind((host, 2112))
        chosen = choose_ports([1, 4, 3], ports=PortRange(2100, 2139), seed="x", leased={2106}, host=host)
    assert len(set(chosen)) == 8
    assert not {2106, 2112} & set(chosen)
    assert chosen[1:5] == tuple(range(chosen[1], chosen[1] + 4))
    assert chosen[5:8] == tuple(range(chosen[5], chosen[5] + 3))


def test_a_row_that_no_gap_is_long_enough_for_is_refused() -> None:
    leased = set(range(2000, 2040, 3))
    with pytest.raises(NoPortError, match="no 3 free ports in 2000-2039"):
        choose_ports([3], ports=PortRange(2000, 2039), seed="", leased=leased, host="127.0.0.1")


# -- logs ----------------------------------------------------------------------------------------
def test_follower_gives_whole_lines_and_begins_again_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(b"one\ntw")
    follower = LogFollower(path)
    assert follower.read() == ([b"one"], 0)
    with path.open("ab") as file:
        file.write(b"o\n")
    assert follower.read() == ([b"two"], 0)
    path.write_bytes(b"new\n")
    assert follower.read() == ([b"new"], 0)


def test_follower_of_a_flood_skips_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(b"x" * 99 + b"\n")
    follower = LogFollower(path)
    follower.read()
    with path.open("ab") as file:
        file.write((b"y" * 99 + b"\n") * 30_000)
    lines, skipped = follower.read()
    assert len(lines) + skipped == pytest.approx(30_000, abs=1)
    assert skipped > 0


def test_chunk_keeps_the_newest_lines_within_its_bound() -> None:
    kept, dropped = fit([f"{number:04}" for number in range(100)], limit_bytes=80)
    assert kept[-1] == "0099"
    assert len(kept) + dropped == 100
    assert len(kept) == 10


def test_overgrown_log_is_cut_and_keeps_its_newest_part(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(b"a" * 1000 + b"end")
    assert logs.cut_if_overgrown(path, 100)
    assert path.stat().st_size == 0
    assert (tmp_path / "1.log.1").read_bytes().endswith(b"end")
    assert not logs.cut_if_overgrown(path, 100)


def test_old_attempts_logs_are_pruned(tmp_path: Path) -> None:
    for attempt in range(1, 12):
        (tmp_path / f"{attempt}.log").touch()
    logs.prune_attempts(tmp_path, keep=5)
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == [7, 8, 9, 10, 11]


# -- probes --------------------------------------------------------------------------------------
def test_vendor_tool_that_fails_leaves_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = discover("n1", cpu_memory_bytes=1 << 20)
    assert (found.uuid, found.kind, found.memory_bytes) == ("CPU-n1", "cpu", 1 << 20)


def test_cpu_never_offers_more_memory_than_there_is() -> None:
    assert cpu_accelerator("n1", 1 << 60).memory_bytes < 1 << 60


def test_host_rates_need_two_readings(tmp_path: Path) -> None:
    times = iter([1.0, 3.0])
    probe = HostProbe(tmp_path, clock=lambda: next(times))
    first, second = probe.read(), probe.read()
    assert first.network_receive_bytes_per_second is None
    assert second.network_receive_bytes_per_second is not None
    assert second.memory_total_bytes is not None
    assert second.memory_total_bytes > 0


# -- home and settings ---------------------------------------------------------------------------
def test_identity_is_made_once_and_shows_no_secret(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    first = home.ensure_identity()
    assert home.ensure_identity() == first
    assert home.identity_file.stat().st_mode & 0o777 == 0o600
    joined = make_home(tmp_path / "other").load_identity()
    assert joined.node_key not in repr(joined)


def test_second_lock_on_a_home_names_the_owner(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    lock = HomeLock(home)
    lock.acquire()
    with pytest.raises(HomeError, match="pid"):
        HomeLock(home).acquire()
    lock.release()
    HomeLock(home).acquire()


def test_environment_beats_the_file_and_nonsense_is_named(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('address = "10.0.0.1"\nport_min = 45000\n')
    environ = {"EXAOPS_AGENT_ADDRESS": "10.0.0.2", "EXAOPS_AGENT_LABELS": "rack=r1, zone=a"}
    config = load_config(file, environ)
    assert config == AgentConfig(address="10.0.0.2", port_min=45_000, labels={"rack": "r1", "zone": "a"})
    with pytest.raises(ConfigError, match="port range"):
        load_config(None, {"EXAOPS_AGENT_PORTS": "50-40"})
    file.write_text("adress = 1\n")
    with pytest.raises(ConfigError, match="adress"):
        load_config(file, {})


@pytest.mark.parametrize(
    ("url", "insecure", "allowed"),
    [
        ("http://127.0.0.1:8000", False, True),
        ("http://localhost:8000", False, True),
        ("http://[::1]:8000", False, True),
        ("https://control.example", False, True),
        ("http://control.example", False, False),
        ("http://127.0.0.1.example", False, False),
        ("http://control.example", True, True),
        ("ftp://control.example", True, False),
    ],
)
def test_token_goes_in_the_clear_only_to_this_machine(url: str, insecure: bool, allowed: bool) -> None:
    if allowed:
        assert check_url(url + "/", insecure=insecure) == url
        return
    with pytest.raises(JoinError):
        check_url(url, insecure=insecure)


def test_celery_is_given_the_same_unix_socket() -> None:
    assert kombu_url("unix:///run/vk.sock?db=2") == "redis+socket:///run/vk.sock?virtual_host=2"
    assert kombu_url("redis://h:1/0") == "redis://h:1/0"
