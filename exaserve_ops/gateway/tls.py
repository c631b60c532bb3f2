"""TLS for clients, out of certificate files that may be renewed under a running gateway."""

from __future__ import annotations

import logging
import ssl

_log = logging.getLogger("exaserve_ops.gateway")


class CertificateError(ValueError):
    """The certificate or its key cannot be used; the message names the file and why."""


class Certificate:
    """A server's certificate chain and key, in a context that every new connection starts from."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        self._files = (certificate_file, key_file or certificate_file)
        self.context = _context(*self._files)

    def reload(self) -> bool:
        """Read the files again, for new connections. Returns whether what they hold can be used."""
        try:
            _context(*self._files)  # half-written files must not spoil the one that serves
            self.context.load_cert_chain(*self._files)
        except (CertificateError, OSError, ssl.SSLError) as error:
            _log.error("event=certificate_kept_old reason=%r", str(error))
            return False
        _log.info("event=certificate_read")
        return True


def _context(certificate_file: str, key_file: str) -> ssl.SSLContext:
    """Make a context. Raises `CertificateError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(certificate_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"{certificate_file}, {key_file}: {error}") from error
    return context
