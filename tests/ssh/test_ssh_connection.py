"""Connections to a real OpenSSH server: who it is, who we are, and waits that end."""

from __future__ import annotations

import base64
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from exaserve_ops.adapters import ssh_connection
from exaserve_ops.adapters.ssh_connection import (
    OUTPUT_BYTES,
    Connection,
    LostConnectionError,
    fetch_host_key,
    open_connection,
)
from exaserve_ops.adapters.ssh_credentials import read_private_key
from exaserve_ops.inventory.domain.installation import Credentials, HostKey, StepFailedError, Target
from tests.fakes.sshd import IS_ROOT, PASSWORD, SSH_KEYGEN, USER, SshServer
from tests.ssh.conftest import ssh_agent

MIB = 1 << 20


def target_of(server: SshServer, *pins: HostKey) -> Target:
    return Target("i", server.host, server.port, USER, "folder", "", pins)


def pinned(server: SshServer) -> Target:
    return target_of(server, fetch_host_key(server.host, server.port, ()))


@pytest.fixture
def connection(server: SshServer) -> Iterator[Connection]:
    with open_connection(pinned(server), Credentials(private_key=server.private_key)) as connection:
        yield connection


# -- who it is ---------------------------------------------------------------------------------------
def test_offered_key_has_the_fingerprint_that_ssh_keygen_prints(server: SshServer) -> None:
    key = fetch_host_key(server.host, server.port, ())
    assert (key.key_type, key.fingerprint) == ("ssh-ed25519", server.fingerprint())


def test_nothing_is_signed_in_to_without_a_pinned_key(server: SshServer) -> None:
    with (
        pytest.raises(StepFailedError, match="no host key is pinned"),
        open_connection(target_of(server), Credentials(password="x")),
    ):
        pass


def test_changed_key_is_refused_with_host_port_and_both_fingerprints(server: SshServer) -> None:
    target, before = pinned(server), server.fingerprint()
    server.stop()
    server.make_host_key("ed25519")
    server.start()
    credentials = Credentials(private_key=server.private_key)
    with pytest.raises(StepFailedError) as refusal, open_connection(target, credentials):
        pass
    for word in (before, server.fingerprint(), str(server.port), "changed"):
        assert word in str(refusal.value)


def test_key_of_a_type_that_nobody_compared_is_refused(server: SshServer) -> None:
    target = pinned(server)
    server.stop()
    server.make_host_key("rsa")
    server.drop_host_key("ed25519")
    server.start()
    with (
        pytest.raises(StepFailedError, match="no host key of a known type") as refusal,
        open_connection(target, Credentials(private_key=server.private_key)),
    ):
        pass
    assert target.pins[0].fingerprint in str(refusal.value)


def test_server_with_several_keys_shows_the_pinned_one(tmp_path: Path) -> None:
    server = SshServer(tmp_path / "d", key_types=("rsa", "ecdsa", "ed25519"))
    server.start()
    try:
        blob = (tmp_path / "d/host_rsa.pub").read_text().split()[1]
        pin = HostKey("ssh-rsa", blob, server.fingerprint("rsa"))
        assert fetch_host_key(server.host, server.port, (pin,)) == pin
        with open_connection(target_of(server, pin), Credentials(private_key=server.private_key)) as link:
            assert link.run("echo there").output == "there\n"
    finally:
        server.stop()


def test_pin_of_one_port_says_nothing_of_another(server: SshServer, tmp_path: Path) -> None:
    other = SshServer(tmp_path / "other")
    other.start()
    try:
        mixed = replace(pinned(server), port=other.port)
        with (
            pytest.raises(StepFailedError, match=f"port {other.port} changed"),
            open_connection(mixed, Credentials(private_key=other.private_key)),
        ):
            pass
    finally:
        other.stop()


# -- who we are --------------------------------------------------------------------------------------
@pytest.mark.skipif(not IS_ROOT, reason="an account with a password of its own needs root")
def test_password_signs_in_and_a_wrong_one_says_so_without_showing_it(server: SshServer) -> None:
    with open_connection(pinned(server), Credentials(password=PASSWORD)) as link:
        assert link.run("id -un").output.strip() == USER
    with (
        pytest.raises(StepFailedError, match=f"{USER}@.*wrong password or user name") as refusal,
        open_connection(pinned(server), Credentials(password="not that one")),
    ):
        pass
    assert "not that one" not in str(refusal.value)


def test_server_that_takes_no_passwords_says_what_it_takes(tmp_path: Path) -> None:
    server = SshServer(
        tmp_path / "d", options=("PasswordAuthentication no", "KbdInteractiveAuthentication no")
    )
    server.start()
    try:
        with (
            pytest.raises(StepFailedError, match="it allows publickey"),
            open_connection(pinned(server), Credentials(password=PASSWORD)),
        ):
            pass
    finally:
        server.stop()


def test_key_that_is_not_authorized_names_the_likely_causes(server: SshServer, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    with (
        pytest.raises(StepFailedError, match="authorized_keys") as refusal,
        open_connection(pinned(server), Credentials(private_key=stranger.read_text())),
    ):
        pass
    assert stranger.read_text().splitlines()[1] not in str(refusal.value)


def test_keys_of_the_ssh_agent_sign_in_and_none_says_so(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with (
        pytest.raises(StepFailedError, match="no ssh-agent with a key: set SSH_AUTH_SOCK"),
        open_connection(pinned(server), Credentials()),
    ):
        pass
    with ssh_agent(tmp_path / "s", server.user_key), open_connection(pinned(server), Credentials()) as link:
        assert link.run("true").succeeded


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    options = ["-m", "PEM"] if kind == "rsa" else []
    subprocess.run([SSH_KEYGEN, "-q", "-t", kind, *options, "-N", passphrase, "-f", str(path)], check=True)
    return path


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_private_keys_of_every_kind_are_read_with_their_passphrase(kind: str, tmp_path: Path) -> None:
    text = make_key(tmp_path / "key", kind=kind, passphrase="open sesame").read_text()
    blob = (tmp_path / "key.pub").read_text().split()[1]
    assert read_private_key(text, "open sesame").asbytes() == base64.b64decode(blob)
    with pytest.raises(StepFailedError, match="give its passphrase"):
        read_private_key(text, "")
    with pytest.raises(StepFailedError, match="passphrase is wrong"):
        read_private_key(text, "open barley")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", "export it as an OpenSSH key"),
        ("ssh-ed25519 AAAA olga@desk", "give the private one"),
        ("nonsense", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_what_is_no_private_key_says_what_it_is(text: str, said: str) -> None:
    with pytest.raises(StepFailedError, match=said):
        read_private_key(text, "")


# -- waits that end ----------------------------------------------------------------------------------
def test_ten_mebibytes_on_both_outputs_are_drained_and_cut_short(connection: Connection) -> None:
    flood = "head -c 10485760 /dev/zero | tr '\\0' a & head -c 10485760 /dev/zero | tr '\\0' b >&2; wait"
    said = connection.run(f"sh -c {flood!r}", seconds=60)
    assert said.status == 0
    for text, letter in ((said.output, "a"), (said.errors, "b")):
        assert text.startswith(letter * 1000)
        assert f"{10 * MIB - OUTPUT_BYTES} bytes more were left out" in text


def test_command_past_its_deadline_is_given_up_and_the_connection_serves_on(connection: Connection) -> None:
    began = time.monotonic()
    said = connection.run("echo begun; sleep 9999", seconds=4.0)
    assert (said.status, said.timed_out, said.output) == (None, True, "begun\n")
    assert time.monotonic() - began < 30
    assert connection.run("echo still here").output == "still here\n"


def test_output_reaches_its_reader_while_the_command_runs(connection: Connection) -> None:
    seen: list[str] = []
    said = connection.run("echo one; read answer; echo $answer", text="two\n", sink=seen.append)
    assert said.output == "one\ntwo\n"
    assert "".join(seen) == said.output


def test_terminal_tricks_of_a_machine_are_only_text(connection: Connection) -> None:
    said = connection.run("printf 'a\\033[2Jb\\007\\r\\nc\\377'")
    assert said.output == "a[2Jb\nc\ufffd"


def test_connection_that_breaks_while_a_command_runs_is_no_success(server: SshServer) -> None:
    with open_connection(pinned(server), Credentials(private_key=server.private_key)) as link:
        timer = threading.Timer(0.5, server.stop)
        timer.start()
        try:
            said = link.run("sleep 60", seconds=40)
        except LostConnectionError:
            said = None
        timer.join()
        # Whichever dies first: the connection, or the command, whose end is then still told.
        assert said is None or said.status != 0
        with pytest.raises(LostConnectionError):
            link.run("true")


# -- servers that are none ---------------------------------------------------------------------------
@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Takes connections and says `answer`, or hangs up at once for `None`."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        place.settimeout(0.1)
        ended = threading.Event()
        open_links: list[socket.socket] = []

        def serve() -> None:
            while not ended.is_set():
                try:
                    link, _ = place.accept()
                except TimeoutError:
                    continue
                if answer is None:
                    link.close()
                    continue
                link.sendall(answer)
                open_links.append(link)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield place.getsockname()[1]
        finally:
            ended.set()
            thread.join()
            for link in open_links:
                link.close()


def test_something_else_on_the_port_is_no_ssh_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_connection, "BANNER_SECONDS", 2.0)
    monkeypatch.setattr(ssh_connection, "BANNER_PAUSE_SECONDS", 0.01)
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200) as port,
        pytest.raises(StepFailedError, match="does not speak SSH"),
    ):
        fetch_host_key("127.0.0.1", port, ())


def test_server_that_hangs_up_is_asked_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_connection, "BANNER_PAUSE_SECONDS", 0.01)
    with listener(None) as port, pytest.raises(StepFailedError, match="does not speak SSH"):
        fetch_host_key("127.0.0.1", port, ())


def test_nobody_there_and_no_such_name_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        free = place.getsockname()[1]
    with pytest.raises(StepFailedError, match="refuses connections on port"):
        fetch_host_key("127.0.0.1", free, ())
    with pytest.raises(StepFailedError, match="is not known here"):
        fetch_host_key("no-such-host.invalid", 22, ())


def test_crowd_behind_a_server_that_drops_beginners_gets_in(tmp_path: Path) -> None:
    server = SshServer(tmp_path / "d", options=("MaxStartups 2:60:8",))
    server.start()
    results: list[object] = []

    def fetch() -> None:
        try:
            results.append(fetch_host_key(server.host, server.port, ()))
        except StepFailedError as error:
            results.append(error)

    try:
        threads = [threading.Thread(target=fetch) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.stop()
    got_in = [result for result in results if isinstance(result, HostKey)]
    assert len(results) == 10
    assert len(got_in) >= 8, results
