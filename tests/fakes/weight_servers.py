"""Servers on loopback that weights come from: with ranges, redirects, secrets and faults."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_CHUNK_BYTES = 64 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class FileServer:
    """What a server gives, and what it was asked. Change it while it runs."""

    contents: Mapping[str, bytes]
    """By path, without the first slash."""
    token: str = ""
    """Demanded as a bearer token."""
    access_key: str = ""
    """Demanded in an S3 signature, whose arithmetic is not checked."""
    ranges: bool = True
    redirect_to: str = ""
    """Sends everybody on to another server, as hubs do."""
    status: int = 0
    """Answered to everything instead."""
    break_after_bytes: int = 0
    """Closes the connection in the middle of a longer body."""
    hangs_up: bool = False
    """Closes each connection after one answer, without having said so."""
    bytes_per_second: float = 0.0
    """Of each body; 0: as fast as it goes."""
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    address: str = ""
    on_answer: Callable[[str], None] = lambda _path: None
    """Told of each path after its answer."""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path).lstrip("/")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((path, headers))
        refusal = self.status or self._refusal(headers)
        if refusal:
            self._send(request, refusal, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.redirect_to:
            request.send_response(302)
            request.send_header("Location", f"{self.redirect_to}/{path}?signature=secret-signature")
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif "list-type=2" in parts.query:
            self._list_objects(request, path.rstrip("/"), parse_qs(parts.query)["prefix"][0])
        elif path not in self.contents:
            self._send(request, 404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        else:
            self._give(request, self.contents[path], headers.get("range", ""))
            self.on_answer(path)

    def _refusal(self, headers: Mapping[str, str]) -> int:
        given = headers.get("authorization", "")
        if self.token and given != f"Bearer {self.token}":
            return 401
        signed = f"Credential={self.access_key}/" in given and given.startswith("AWS4-HMAC-SHA256")
        return 403 if self.access_key and not signed else 0

    def _list_objects(self, request: BaseHTTPRequestHandler, bucket: str, prefix: str) -> None:
        """The objects of a bucket below a prefix, as S3 has them."""
        found = {
            path.removeprefix(f"{bucket}/"): content
            for path, content in sorted(self.contents.items())
            if path.startswith(f"{bucket}/{prefix}")
        }
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(content)}</Size><ETag>&quot;{self._etag(content)}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, content in found.items()
        )
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        head = f"<Name>{bucket}</Name><Prefix>{prefix}</Prefix><IsTruncated>false</IsTruncated>"
        self._send(request, 200, f"<ListBucketResult {space}>{head}{rows}</ListBucketResult>".encode())

    @staticmethod
    def _etag(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()[:32]

    def _give(self, request: BaseHTTPRequestHandler, content: bytes, wanted: str) -> None:
        match = _RANGE.fullmatch(wanted) if self.ranges else None
        if match is None:
            self._send(request, 200, content, {"ETag": self._etag(content)})
            return
        first, last = int(match[1]), min(int(match[2]), len(content) - 1)
        if first >= len(content):
            self._send(request, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        extra = {"Content-Range": f"bytes {first}-{last}/{len(content)}", "ETag": self._etag(content)}
        self._send(request, 206, content[first : last + 1], extra)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.send_header(
            "Content-Type", "application/xml" if status >= 400 else "application/octet-stream"
        )
        for name, value in (extra or {}).items():
            request.send_header(name, value)
        request.end_headers()
        if 0 < self.break_after_bytes < len(body) and status < 400:
            request.wfile.write(body[: self.break_after_bytes])
            self._hang_up(request)
            return
        self._write(request, body)
        if self.hangs_up:
            self._hang_up(request)

    @staticmethod
    def _hang_up(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.close()

    def _write(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        for start in range(0, len(body), _CHUNK_BYTES):
            chunk = body[start : start + _CHUNK_BYTES]
            request.wfile.write(chunk)
            if self.bytes_per_second:
                time.sleep(len(chunk) / self.bytes_per_second)


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    """Serve on a free port of loopback; `address` is set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *args: Any) -> None:
            """Nothing: tests read `asked`."""

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            """Nothing: clients are cut off on purpose."""

    listener = Listener(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
