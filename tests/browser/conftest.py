"""The product's pages in a real Chromium, against a real server with real stores."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from django.db import connection
from django.test import Client
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.live_fleet import PaperFleet
from tests.fakes.world import make_user

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_START_SECONDS = 60.0
"""A busy machine takes a while to import Django; what is waited for comes at once elsewhere."""
WAIT_MS = 30_000
_LIVE_TRY_MS = 4_000
_LIVE_TRIES = 20
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session", autouse=True)
def _database_beside_a_browser() -> None:
    """Playwright runs an event loop in the test's thread, where Django would refuse the database."""
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; see `make chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Site:
    """The web process; it can be stopped and started again on the same port."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        database = str(connection.settings_dict["NAME"])
        address = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{database}").geturl()
        # `_replace` drops the empty host of `postgresql:///name`, which the slashes stand for.
        address = address.replace("postgresql:/", "postgresql:///", 1) if "://" not in address else address
        environment = os.environ | {
            "DATABASE_URL": address,
            "DJANGO_SETTINGS_MODULE": "exaserve_ops.settings.test",
            "EXAOPS_PUBLIC_URL": self.url,
        }
        command = [sys.executable, "-m", "uvicorn", "exaserve_ops.asgi:application"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            said = self._log.read_text()
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def site(transactional_db: None, tmp_path: Path) -> Iterator[Site]:  # noqa: ARG001 - pages read it
    site = Site(tmp_path / "web.log")
    site.start()
    yield site
    site.stop()


@pytest.fixture
def fleet(redis_client: redis.Redis) -> PaperFleet:
    return PaperFleet(client=redis_client)


class Complaints(list[str]):
    """What the console said that nobody wants to read there."""


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def page(browser: Browser, site: Site, complaints: Complaints) -> Iterator[Page]:
    """A page with an operator logged in."""
    login = Client()
    login.force_login(make_user("olga", "operator"))
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_cookies([{"name": "sessionid", "value": login.cookies["sessionid"].value, "url": site.url}])
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda m: complaints.append(m.text) if m.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()


def wait_until_live(page: Page, fleet: PaperFleet) -> None:
    """Publish seconds, as controllers do, until the page shows one of them while it is fresh."""
    for tries_left in reversed(range(_LIVE_TRIES)):
        fleet.publish()
        try:
            expect(page.locator("[data-live]")).to_have_text(re.compile("live"), timeout=_LIVE_TRY_MS)
        except AssertionError:
            if not tries_left:
                raise
        else:
            return


def open_live(page: Page, site: Site, fleet: PaperFleet, path: str = "/") -> None:
    """Open a page, and wait until its link is live; of the fleet page until the maps are drawn, too."""
    page.goto(site.url + path)
    wait_until_live(page, fleet)
    if path == "/":
        page.wait_for_selector("[data-map='1'] [data-plot] image")
