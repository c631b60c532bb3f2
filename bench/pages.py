"""`python -m bench.pages --nodes 1024 --replicas 12 --json`: what the pages of a large fleet cost.

Starts a database, a Redis and the web process, fills them with a fleet on paper whose figures change
each second, and opens each page in Chromium: how long the server takes, when something is seen, how
long the page blocks, how large it grows, and what it costs when nobody touches it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import psutil
import redis

from exaserve_ops.adapters import stores
from exaserve_ops.adapters.fleet_files import open_fleet_files

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

HERE = Path(__file__).resolve().parents[1]
REQUESTS = 5
"""Of each page, to know how long the server takes; the first one is left out."""
FEWEST_REQUESTS = 2
PAGE_SECONDS = 6.0
"""A page that is slow on a busy machine is asked for less often: the whole shall end within minutes."""
SETTLE_SECONDS = 8.0
START_SECONDS = 60.0
SIZES = {"wide": (1440, 900), "phone": (390, 844)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0
_HOVERS = 60
_MIB = 1 << 20

# Run before each page's own scripts: when the maps are drawn, and what blocks the page.
_WATCH = """
window.measured = { drawn: null, longest: 0, long: 0, blocked: 0 };
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    window.measured.long += 1;
    window.measured.blocked += entry.duration - 50;
    window.measured.longest = Math.max(window.measured.longest, entry.duration);
  }
}).observe({ type: "longtask", buffered: true });
const seen = setInterval(() => {
  const stages = [...document.querySelectorAll("[data-stage]")];
  const drawn = (stage) => stage.querySelector("[data-plot] image") && !stage.classList.contains("waiting");
  if (!stages.length || !stages.every(drawn)) return;
  window.measured.drawn = performance.now();
  clearInterval(seen);
}, 20);
"""
_FORGET = "() => Object.assign(window.measured, { longest: 0, long: 0, blocked: 0 })"
_COUNT_FRAMES = """() => {
  const counted = { frames: 0, since: performance.now(), done: false };
  const count = () => { if (!counted.done) { counted.frames += 1; requestAnimationFrame(count); } };
  requestAnimationFrame(count);
  window.counted = counted;
}"""
_FRAMES_A_SECOND = """() => {
  window.counted.done = true;
  return 1000 * window.counted.frames / (performance.now() - window.counted.since);
}"""
_FIRST_PAINT = (
    "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"  # in milliseconds
)


@dataclass(frozen=True, slots=True)
class Site:
    """The running web process, and the session of somebody who may see everything."""

    url: str
    session: str
    paths: dict[str, str]


@contextlib.contextmanager
def running_site(nodes: int, replicas: int, folder: Path) -> Iterator[Site]:
    """Stores, web process and live feed for as long as the block lasts."""
    with contextlib.ExitStack() as running:
        files = open_fleet_files(folder / "var")
        running.callback(shutil.rmtree, files.runtime, ignore_errors=True)
        postgres, valkey = stores.prepare_postgres(files), stores.prepare_valkey(files)
        _start(running, postgres.command(), folder / "postgres.log", stop=signal.SIGINT)
        _start(running, valkey.command(), folder / "valkey.log")
        database_url = _once_ready(lambda: stores.create_database(files, postgres))
        redis_url = valkey.url(files.secret("valkey_password"))
        _once_ready(lambda: stores.check_redis(redis_url))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        os.environ.update(
            DATABASE_URL=database_url,
            REDIS_URL=redis_url,
            EXAOPS_VAR_DIR=str(files.var),
            EXAOPS_SECRET_KEY=secrets.token_hex(32),
            EXAOPS_FLEET_SECRET=secrets.token_hex(32),
            EXAOPS_PUBLIC_URL=f"http://127.0.0.1:{port}",
            DJANGO_SETTINGS_MODULE="exaserve_ops.settings.prod",
        )
        session, paths = _fill(running, nodes, replicas, redis_url)
        command = [sys.executable, "-m", "uvicorn", "exaserve_ops.asgi:application", "--port", str(port)]
        _start(running, (*command, "--ws", "websockets", "--no-access-log"), folder / "web.log")
        url = f"http://127.0.0.1:{port}"
        _once_ready(lambda: httpx.get(f"{url}/readyz").raise_for_status())
        try:
            yield Site(url, session, paths)
        except httpx.HTTPStatusError:
            print((folder / "web.log").read_text()[-4000:], file=sys.stderr)
            raise


def _fill(
    running: contextlib.ExitStack, nodes: int, replicas: int, redis_url: str
) -> tuple[str, dict[str, str]]:
    """Write the fleet, start its feed; returns a session key, and the addresses of the pages."""
    import django  # noqa: PLC0415 - reads the environment that was set just before

    django.setup()
    from django.contrib.auth.models import User  # noqa: PLC0415 - needs Django to be set up
    from django.core.management import call_command  # noqa: PLC0415
    from django.test import Client  # noqa: PLC0415

    from bench.paper_fleet import live_feed, write_fleet  # noqa: PLC0415

    logging.getLogger("httpx").setLevel(logging.WARNING)
    call_command("migrate", verbosity=0)
    fleet = write_fleet(nodes, replicas)
    running.enter_context(live_feed(fleet, redis.Redis.from_url(redis_url)))
    login = Client()
    login.force_login(User.objects.create_superuser("bench"))
    deployment = f"/deployments/{fleet.deployment_id}"
    node_id, on_it = fleet.placed[-1]
    return login.cookies["sessionid"].value, {
        "fleet": "/",
        "nodes": "/nodes",
        "node": f"/nodes/{node_id}",
        "replicas": "/replicas",
        "replica": f"/replicas/{on_it[0]}",
        "deployments": "/deployments",
        "deployment": deployment,
        "plan": f"{deployment}/plan",
        "scale": f"{deployment}/scale?replicas={nodes * replicas + 500}",
        "incidents": "/incidents",
        "incident": f"/incidents/{fleet.incident_id}",
        "events": "/events",
        "sessions": "/sessions",
        "search": "/search?q=node",
        "rest nodes": "/api/v1/nodes?page_size=500",
        "rest replicas": "/api/v1/replicas?page_size=500",
        "rest plan": f"/api/v1{deployment}/plan",
        "rest spread": f"/api/v1{deployment}/spread",
    }


def _start(
    running: contextlib.ExitStack,
    command: Sequence[str],
    log: Path,
    *,
    stop: signal.Signals = signal.SIGTERM,
) -> None:
    output = running.enter_context(log.open("wb"))
    process = subprocess.Popen(command, cwd=HERE, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def end() -> None:
        process.send_signal(stop)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    running.callback(end)


def _once_ready(ask: Any) -> Any:  # noqa: ANN401 - whatever the question answers
    """Ask until there is an answer. Raises what the last one raised after `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return ask()
        except (stores.StoreError, httpx.HTTPError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def time_server(site: Site) -> dict[str, dict[str, float]]:
    """Seconds that the server takes for each page, and the page's size on the wire."""
    figures: dict[str, dict[str, float]] = {}
    with httpx.Client(base_url=site.url, cookies={"sessionid": site.session}, timeout=120) as client:
        for name, path in site.paths.items():
            took: list[float] = []
            size_bytes = 0
            while len(took) <= REQUESTS and (len(took) < FEWEST_REQUESTS or sum(took) < PAGE_SECONDS):
                began = time.monotonic()
                size_bytes = len(client.get(path).raise_for_status().content)
                took.append(time.monotonic() - began)
            figures[name] = {
                "server_seconds": round(statistics.median(took[1:]), 3),
                "html_kib": round(size_bytes / 1024, 1),
            }
    return figures


class Viewer:
    """One open page of Chromium, and what it costs."""

    def __init__(self, page: Page, devtools: CDPSession) -> None:
        self.page = page
        self._devtools = devtools
        devtools.send("Performance.enable")

    def heap_mib(self) -> float:
        """JavaScript heap after everything unused was let go."""
        self._devtools.send("HeapProfiler.collectGarbage")
        return round(self._metrics()["JSHeapUsedSize"] / _MIB, 1)

    def busy_seconds(self) -> float:
        """Seconds that the page's own thread has worked so far."""
        return self._metrics()["TaskDuration"]

    def blocked(self) -> dict[str, float]:
        """Tasks over 50 ms since the last question: how many, the longest, and what was over in all."""
        said = self.page.evaluate("() => window.measured")
        self.page.evaluate(_FORGET)
        return {
            "long_tasks": said["long"],
            "longest_task_ms": round(said["longest"]),
            "blocked_ms": round(said["blocked"]),
        }

    def _metrics(self) -> dict[str, float]:
        answer = self._devtools.send("Performance.getMetrics")
        return {metric["name"]: metric["value"] for metric in answer["metrics"]}


def measure_fleet_page(viewer: Viewer, site: Site, idle_seconds: float) -> dict[str, Any]:
    """The front page: first paint, heatmaps drawn, idling, hovering over cells, scrolling."""
    page = viewer.page
    page.goto(site.url)
    page.wait_for_function("() => window.measured.drawn !== null", timeout=60_000)
    figures: dict[str, Any] = {
        "first_paint_ms": round(page.evaluate(_FIRST_PAINT)),
        "maps_drawn_ms": round(page.evaluate("() => window.measured.drawn")),
    }
    figures |= {f"load_{name}": value for name, value in viewer.blocked().items()}
    page.wait_for_timeout(SETTLE_SECONDS * 1000)
    viewer.blocked()
    heap, busy, cpu, began = viewer.heap_mib(), viewer.busy_seconds(), _browser_cpu(), time.monotonic()
    page.wait_for_timeout(idle_seconds * 1000)
    took = time.monotonic() - began
    figures |= {
        "idle_page_core_ratio": round((viewer.busy_seconds() - busy) / took, 3),
        "idle_browser_core_ratio": round((_browser_cpu() - cpu) / took, 3),
        "heap_mib": viewer.heap_mib(),
        "heap_before_mib": heap,
    }
    figures |= {f"idle_{name}": value for name, value in viewer.blocked().items()}
    page.evaluate(_COUNT_FRAMES)
    _hover(page)
    figures["hover_frames_per_second"] = round(page.evaluate(_FRAMES_A_SECOND), 1)
    figures |= {f"hover_{name}": value for name, value in viewer.blocked().items()}
    page.evaluate(_COUNT_FRAMES)
    for step in (400, -400) * 10:
        page.mouse.wheel(0, step)
        page.wait_for_timeout(30)
    figures["scroll_frames_per_second"] = round(page.evaluate(_FRAMES_A_SECOND), 1)
    return figures | {f"scroll_{name}": value for name, value in viewer.blocked().items()}


def _hover(page: Page) -> None:
    box = page.locator("[data-map='1'] [data-cells]").bounding_box()
    if box is None:
        raise RuntimeError("the first heatmap has no size")
    for step in range(_HOVERS):
        across, down = (step * 7 % 50 + 0.5) / 50, (step * 11 % 40 + 0.5) / 40
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])


def measure_lists(viewer: Viewer, site: Site, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """First paint and blocking of every page but the front one."""
    figures: dict[str, dict[str, float]] = {}
    for name in names:
        viewer.page.goto(site.url + site.paths[name])
        viewer.page.wait_for_timeout(2500)
        paint = viewer.page.evaluate(_FIRST_PAINT)
        figures[name] = {"first_paint_ms": round(paint or 0)} | viewer.blocked()
        figures[name]["heap_mib"] = viewer.heap_mib()
        figures[name]["elements"] = viewer.page.evaluate("() => document.querySelectorAll('*').length")
        figures[name]["overflow_px"] = viewer.page.evaluate(
            "() => Math.max(0, document.documentElement.scrollWidth - window.innerWidth)"
        )
    return figures


def _browser_cpu() -> float:
    """CPU seconds of all processes of the browser that this process started."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "chrom" in child.name():
                times = child.cpu_times()
                total += times.user + times.system
    return total


def _open(browser: Browser, site: Site, size: str, theme: Literal["light", "dark"]) -> Viewer:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    context.add_cookies([{"name": "sessionid", "value": site.session, "url": site.url}])
    context.add_init_script(_WATCH)
    page = context.new_page()
    return Viewer(page, context.new_cdp_session(page))


def _take_pictures(browser: Browser, site: Site, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for theme in THEMES:
            viewer = _open(browser, site, size, theme)
            for name, path in site.paths.items():
                if name.startswith("rest"):
                    continue
                viewer.page.goto(site.url + path)
                viewer.page.wait_for_timeout(4000 if name == "fleet" else 800)
                viewer.page.screenshot(path=folder / f"{name}-{size}-{theme}.png")
            viewer.page.context.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything on one fleet."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the development requirements

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    figures: dict[str, Any] = {"nodes": arguments.nodes, "replicas": arguments.nodes * arguments.replicas}
    figures |= {"cpu_count": os.cpu_count(), "load1_before": round(os.getloadavg()[0], 2)}
    with (
        tempfile.TemporaryDirectory(prefix="exaops-pages-") as folder,
        running_site(arguments.nodes, arguments.replicas, Path(folder)) as site,
    ):
        figures["server"] = time_server(site)
        print(json.dumps(figures), file=sys.stderr)  # what follows takes minutes
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            viewer = _open(browser, site, "wide", "light")
            print("in Chromium: the fleet page, the others, the fleet page on a phone", file=sys.stderr)
            figures["fleet"] = measure_fleet_page(viewer, site, arguments.seconds)
            pages = [n for n in site.paths if n != "fleet" and not n.startswith("rest")]
            figures["pages"] = measure_lists(viewer, site, pages)
            viewer.page.context.close()
            narrow = _open(browser, site, "phone", "dark")
            figures["fleet_on_a_phone"] = measure_fleet_page(narrow, site, arguments.seconds)
            narrow.page.context.close()
            if arguments.pictures:
                _take_pictures(browser, site, arguments.pictures)
            browser.close()
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.pages", description="What the pages of a fleet cost.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--replicas", type=int, default=12, help="on each node")
    parser.add_argument("--seconds", type=float, default=15.0, help="of idling")
    parser.add_argument("--pictures", type=Path, help="keep a picture of every page in this folder")
    arguments = parser.parse_args(argv)
    # Whoever ends the benchmark ends its processes: `finally` blocks run for this exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    figures = measure(arguments)
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, group in figures.items():
        print(name, json.dumps(group))
    return 0


if __name__ == "__main__":
    sys.exit(main())
