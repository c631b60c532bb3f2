"""A very small HTTP engine for tests of the agent: standard library only, misbehaves on request.

Arguments: `host port option=value ...` with the options
`exit=CODE` (print an error and exit), `ignore_term=1`, `children=N` (sleeping children, one of them
in a session of its own), `load_seconds=X`, `running=N` (open requests in /metrics),
`running_file=PATH` (read the number from a file instead), `chatty=N` (lines to print at the start),
`tokens_file=PATH` (tokens generated so far), `tokens_per_second=X` (the same by the clock),
`slow_file=PATH` (while it exists /health takes `health_seconds=X`), `close_file=PATH` (once it exists:
remove it, close the port and live on), `cards=FOLDER` with `vram_mib=N` (take so much of the card that it
sees, see `tests.fakes.cards`, or end for want of it).

`rank=N nodes=M meet=PORT`: a member of several, which meet on this host. Rank 0 is ready once all have come;
each ends when another is gone, unless `stays=1`.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

STARTED = time.monotonic()
CLOSED = threading.Event()
MET: list[socket.socket] = []
"""Members that have come to rank 0."""


def options(arguments: list[str]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in arguments)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    settings: dict[str, str] = {}

    def do_GET(self) -> None:
        if CLOSED.is_set():
            self.close_connection = True
        elif self.path == "/environ":
            self._answer(200, json.dumps(dict(os.environ)))
        elif self.path == "/notes":
            prepared = sys.modules.get("tests.fakes.prepared_note")
            self._answer(200, json.dumps(prepared.NOTES if prepared else []))
        elif self.path == "/metrics":
            self._answer(200, f"running {self._running()}\n{self._tokens()}")
        elif not self._may_be_ready():
            self._answer(503, "loading")
        else:
            if Path(self.settings.get("slow_file", "/none")).exists():
                time.sleep(float(self.settings["health_seconds"]))
            self._answer(200, "ok")

    def _may_be_ready(self) -> bool:
        loaded = time.monotonic() - STARTED >= float(self.settings.get("load_seconds", "0"))
        return loaded and len(MET) >= int(self.settings.get("nodes", "1")) - 1

    def _tokens(self) -> str:
        file, rate = self.settings.get("tokens_file"), self.settings.get("tokens_per_second")
        if file:
            return f"tokens {Path(file).read_text()}\n"
        return f"tokens {float(rate) * (time.monotonic() - STARTED)}\n" if rate else ""

    def _running(self) -> int:
        file = self.settings.get("running_file")
        return int(Path(file).read_text() if file else self.settings.get("running", "0"))

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def took_memory(settings: dict[str, str]) -> bool:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.fakes.cards import allocate  # noqa: PLC0415 - nothing of ours is needed but for this

    card = os.environ["CUDA_VISIBLE_DEVICES"]
    return allocate(Path(settings["cards"]), card, int(settings["vram_mib"]))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    host, port, *rest = sys.argv[1:]
    settings = Handler.settings = options(rest)
    for number in range(int(settings.get("chatty", "0"))):
        say(f"line {number}")
    say(f"key {os.environ.get('EXAOPS_ENGINE_API_KEY', '')}")
    if "exit" in settings:
        say("error: unrecognized arguments: --quantization nope")
        return int(settings["exit"])
    if settings.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(int(settings.get("children", "0"))):
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=number == 0)
    if "cards" in settings and not took_memory(settings):
        say("torch.OutOfMemoryError: CUDA out of memory")
        return 1
    return follow(host, settings) if int(settings.get("rank", "0")) else serve(host, int(port), settings)


def serve(host: str, port: int, settings: dict[str, str]) -> int:
    if "meet" in settings:
        threading.Thread(target=meet, args=(host, settings), daemon=True).start()
    server = http.server.ThreadingHTTPServer((host, port), Handler)
    say("serving")
    if "close_file" in settings:
        arguments = (Path(settings["close_file"]), server)
        threading.Thread(target=close_port_when, args=arguments, daemon=True).start()
    server.serve_forever()
    if server.socket.fileno() == -1:
        signal.pause()  # closed on purpose: the process lives in vain
    return 0


def meet(host: str, settings: dict[str, str]) -> None:
    listener = socket.create_server((host, int(settings["meet"])))
    while True:
        member, _ = listener.accept()
        MET.append(member)
        threading.Thread(target=hold, args=(member, settings), daemon=True).start()


def follow(host: str, settings: dict[str, str]) -> int:
    hold(reach(host, int(settings["meet"])), settings)
    return 1


def reach(host: str, port: int) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port))
        time.sleep(0.05)


def hold(other: socket.socket, settings: dict[str, str]) -> None:
    """Live until the other is gone, and then no longer, unless told to stay."""
    with contextlib.suppress(OSError):
        other.recv(1)
    say("a member is gone")
    if not settings.get("stays"):
        os._exit(1)
    threading.Event().wait()


def close_port_when(file: Path, server: http.server.ThreadingHTTPServer) -> None:
    while not file.exists():
        time.sleep(0.05)
    file.unlink()
    CLOSED.set()
    server.socket.close()
    server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
