"""Takes pictures of every page of a running fleet, in both themes, wide and narrow."""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from django.core.management.base import BaseCommand, CommandError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = {
    "fleet": "",
    "nodes": "nodes",
    "deployments": "deployments",
    "replicas": "replicas",
    "sessions": "sessions",
    "models": "models",
    "incidents": "incidents",
    "events": "events",
    "keys": "keys",
}
FIRST_OF = {"node": "nodes", "deployment": "deployments", "replica": "replicas", "model": "models"}
"""Pages of one thing, by the list whose first row leads there. Pictured to their end."""
SIZES = {"wide": (1440, 900), "phone": (390, 844)}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SETTLE_MS = 3000
PASSWORD_VARIABLE = "EXAOPS_SCREENSHOT_PASSWORD"  # noqa: S105 - the variable's name, no password
LOGIN_MS = 15_000


class Command(BaseCommand):
    """Needs Chromium and the development requirements; writes PNG files into a folder."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Where the fleet is, who looks at it, and where the pictures go."""
        parser.add_argument("--url", default="http://127.0.0.1:8000")
        parser.add_argument("--user", default="admin", help=f"its password: {PASSWORD_VARIABLE}")
        parser.add_argument("--out", type=Path, default=Path("var/pictures"))

    def handle(self, *_: object, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Take the pictures. Raises `CommandError` for what is missing."""
        password = os.environ.get(PASSWORD_VARIABLE, "")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        if not password or chromium is None:
            raise CommandError(f"set {PASSWORD_VARIABLE}, and install Chromium (`make chromium`)")
        try:
            from playwright.sync_api import sync_playwright  # noqa: PLC0415 - development only
        except ModuleNotFoundError as error:
            raise CommandError("Playwright is missing: `make venv-dev`") from error
        options["out"].mkdir(parents=True, exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for size in SIZES:
                for theme in THEMES:
                    self._take(browser, size, theme, {**options, "password": password})
            browser.close()

    def _take(
        self, browser: Browser, size: str, theme: Literal["light", "dark"], options: dict[str, Any]
    ) -> None:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=2
        )
        page = context.new_page()
        base = str(options["url"]).rstrip("/")
        _log_in(page, base, options["user"], options["password"])
        for name, path in PAGES.items():
            page.goto(f"{base}/{path}")
            self._shoot(page, options["out"] / f"{name}-{size}-{theme}.png", whole=False)
        for name, path in FIRST_OF.items():
            page.goto(f"{base}/{path}")
            page.locator("tbody a").first.click()
            page.wait_for_url(f"{base}/{path}/*")
            self._shoot(page, options["out"] / f"{name}-{size}-{theme}.png", whole=True)
        context.close()

    def _shoot(self, page: Page, picture: Path, *, whole: bool) -> None:
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=picture, full_page=whole)
        self.stdout.write(str(picture))


def _log_in(page: Page, base: str, user: str, password: str) -> None:
    page.goto(f"{base}/login")
    page.fill("[name=username]", user)
    page.fill("[name=password]", password)
    page.click("form button")
    page.wait_for_url(lambda address: "/login" not in address, timeout=LOGIN_MS)
