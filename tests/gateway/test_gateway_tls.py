"""TLS for clients, and certificates that are renewed under a running gateway."""

from __future__ import annotations

import asyncio
import datetime
import signal
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from exaserve_ops.gateway.tls import Certificate, CertificateError
from tests.fakes.upstream import CHAT, DONE, replies, streams, token
from tests.gateway.harness import World, request_bytes
from tests.gateway.test_gateway_process import at, running

pytestmark = pytest.mark.asyncio

_START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def write_certificate(folder: Path, name: str) -> Path:
    """Write a certificate for `name` and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_START)
        .not_valid_after(_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "gateway.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def trusting(path: Path) -> ssl.SSLContext:
    """What a client uses that trusts nobody but this certificate."""
    return ssl.create_default_context(cadata=path.read_text()[path.read_text().index("-----BEGIN CERT") :])


async def test_answers_and_refusals_pass_over_tls(world: World, tmp_path: Path) -> None:
    path = write_certificate(tmp_path, "gateway.test")
    engine = await world.engine(replies(CHAT))
    gateway = await world.gateway(certificate=Certificate(str(path), ""))
    tls = {"ssl": trusting(path), "server_hostname": "gateway.test"}
    wire = await gateway.connect(**tls)
    await wire.send(request_bytes({"model": "m"}))
    assert (await wire.reply()).json() == CHAT
    engine.answer = streams([token("a"), DONE])
    await wire.send(request_bytes({"model": "m", "stream": True}))
    assert (await wire.reply()).body == token("a") + DONE
    session = wire.writer.get_extra_info("ssl_object")
    assert session.version() in {"TLSv1.2", "TLSv1.3"}
    (connection,) = gateway.shared.connections
    connected = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined] # the one class
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    await wire.send(b"nonsense\r\n\r\n")
    assert (await wire.reply()).status == 400
    wire.close()


async def test_plain_http_gets_no_answer_where_tls_is_spoken(world: World, tmp_path: Path) -> None:
    engine = await world.engine(replies(CHAT))
    certificate = Certificate(str(write_certificate(tmp_path, "gateway.test")), "")
    gateway = await world.gateway(certificate=certificate)
    wire = await gateway.send(request_bytes({"model": "m"}))
    assert b"200" not in await wire.rest()
    assert engine.requests == []


async def test_renewed_certificate_serves_new_connections_and_a_broken_one_changes_nothing(
    world: World, tmp_path: Path
) -> None:
    path = write_certificate(tmp_path, "gateway.test")
    await world.engine(replies(CHAT))
    certificate = Certificate(str(path), "")
    gateway = await world.gateway(certificate=certificate)
    first = trusting(path)
    old = await gateway.connect(ssl=first, server_hostname="gateway.test")
    write_certificate(tmp_path, "gateway.test")
    second = trusting(path)
    assert certificate.reload()
    new = await gateway.connect(ssl=second, server_hostname="gateway.test")
    with pytest.raises(ssl.SSLCertVerificationError):
        await gateway.connect(ssl=first, server_hostname="gateway.test")
    path.write_text("half a certifi")
    assert not certificate.reload()
    newer = await gateway.connect(ssl=second, server_hostname="gateway.test")
    for wire in (old, new, newer):
        await wire.send(request_bytes({"model": "m"}))
        assert (await wire.reply()).status == 200
        wire.close()


async def test_hangup_signal_has_the_certificate_read_again(world: World, tmp_path: Path) -> None:
    path = write_certificate(tmp_path, "gateway.test")
    async with running(world.url, EXAOPS_GATEWAY_TLS_CERTIFICATE=str(path)) as (port, process):
        gateway = await at(port, world)
        (await gateway.connect(ssl=trusting(path), server_hostname="gateway.test")).close()
        write_certificate(tmp_path, "gateway.test")
        process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while True:
                try:
                    wire = await gateway.connect(ssl=trusting(path), server_hostname="gateway.test")
                except ssl.SSLCertVerificationError:
                    await asyncio.sleep(0.02)
                    continue
                break
        await wire.send(request_bytes(b"", method="GET", path="/health", key=None))
        assert (await wire.reply()).status == 200
        assert process.poll() is None
        wire.close()


async def test_unusable_certificate_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"missing\.pem"):
        Certificate(str(tmp_path / "missing.pem"), "")
