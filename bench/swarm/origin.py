"""The origin: a folder over HTTP with ranges, by `sendfile`. Run by the benchmark in its own namespace."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from pathlib import Path

_RANGE = re.compile(r"^range:\s*bytes=(\d+)-(\d+)\s*$", re.IGNORECASE | re.MULTILINE)
_GET = re.compile(r"^GET /(\S+) HTTP/1\.1\r?$", re.MULTILINE)


def serve(folder: Path, address: str, port: int) -> None:
    """Serve for ever."""
    listener = socket.create_server((address, port), backlog=128)
    print("ready", flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_answer_all, args=(sock, folder), daemon=True).start()


def _answer_all(sock: socket.socket, folder: Path) -> None:
    buffer = b""
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                while b"\r\n\r\n" not in buffer:
                    more = sock.recv(4096)
                    if not more:
                        return
                    buffer += more
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                _answer(sock, folder, head.decode("latin-1"))
        except OSError:
            return  # the client is gone


def _answer(sock: socket.socket, folder: Path, head: str) -> None:
    asked = _GET.search(head)
    path = folder / asked[1] if asked else folder / "none"
    if ".." in path.parts or not path.is_file():
        sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    size = path.stat().st_size
    ranged = _RANGE.search(head)
    start, stop = (int(ranged[1]), min(int(ranged[2]) + 1, size)) if ranged else (0, size)
    status = "206 Partial Content" if ranged else "200 OK"
    with path.open("rb") as file:
        sock.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\n"
            f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n\r\n".encode()
        )
        while start < stop:
            start += os.sendfile(sock.fileno(), file.fileno(), start, stop - start)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
