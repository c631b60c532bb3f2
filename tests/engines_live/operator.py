"""A person at the pages, in Chromium: signs in, fills forms in, reads plans, presses buttons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page, expect

from workers.protocol.engines.tables import TABLES

WAIT_MS = 120_000
"""A page of a machine that is loading engines takes a while."""
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Operator:
    """Who is signed in, and what stood in the console that nobody wants to read there."""

    page: Page
    web_url: str
    complaints: list[str]

    def sign_in(self, user: str, password: str) -> None:
        """Begin."""
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.open("/login")
        self.page.fill("[name=username]", user)
        self.page.fill("[name=password]", password)
        self.page.click("form button")
        self.page.wait_for_url(lambda address: "/login" not in address)

    def open(self, path: str) -> None:
        """Go to a page, which must be there."""
        answer = self.page.goto(self.web_url + path)
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"

    def register(self, name: str, folder: str) -> str:
        """Register a model; returns its id."""
        self.open("/models/new")
        self.page.fill("[name=name]", name)
        self.page.fill("[name=path]", folder)
        self._press("Register")
        return self._arrived("models")

    def deploy(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Fill in the form of a new deployment, read its plan and make it; returns its id.

        `fields` by the names of the form; `options`: what is typed into the fields of the engine's options.
        """
        self.open("/deployments/new")
        self._choose_engine(fields["engine"])
        for name, value in options.items():
            field = self.page.locator(f"[name=o-{name}]")
            group = self.page.locator("details", has=field)
            if group.get_attribute("open") is None:
                group.locator("summary").click()
            self._put(f"o-{name}", value)
        self._fill({name: value for name, value in fields.items() if name != "engine"})
        self._press("Show the plan")
        self._press(f"Create {fields['name']}")
        return self._arrived("deployments")

    def scale(self, deployment_id: str, replicas: int) -> None:
        """Ask for another number of replicas."""
        self.open(f"/deployments/{deployment_id}")
        self.page.fill("#scale-to", str(replicas))
        self._press("Plan scaling")
        self._press(f"Scale to {replicas}")
        self._arrived("deployments")

    def prepare_replacing(self, replica_id: str, why: str) -> None:
        """Open the sheet that drains a replica and has another one made, and say why."""
        self.open(f"/replicas/{replica_id}")
        sheet = self.page.locator("details.action", has_text="Replace")
        sheet.locator("summary").click()
        sheet.locator("[name=reason]").fill(why)

    def replace(self) -> None:
        """Press the button of the sheet."""
        sheet = self.page.locator("details.action", has_text="Replace")
        sheet.locator("form button").click()
        self.page.wait_for_load_state()

    def roll_out(self, deployment_id: str, model: str, policy: Mapping[str, Any]) -> str:
        """Choose other weights, read the plan and begin; returns the rollout's id."""
        self.open(f"/deployments/{deployment_id}/rollout")
        self.page.select_option("[name=model]", label=model)
        self._fill(policy)
        self._press("Show the plan")
        self._press("Begin this rollout")
        return self._arrived("rollouts")

    def move_session(self, key: int, target: str, why: str) -> None:
        """Have a conversation moved to a replica, by its id."""
        self.open(f"/sessions/{key}")
        sheet = self.page.locator("details.action", has_text="Move to")
        sheet.locator("summary").click()
        sheet.locator("[name=target]").select_option(target)
        sheet.locator("[name=reason]").fill(why)
        sheet.locator("form button").click()
        expect(self.page.locator("body")).to_contain_text("before its next turn", timeout=WAIT_MS)

    def validate(self, model_id: str, engines: tuple[str, ...], fields: Mapping[str, Any]) -> str:
        """Ask for a validation; returns its id."""
        self.open(f"/models/{model_id}/validate")
        for engine in engines:
            self.page.check(f"[name=engines][value={engine}]")
        self._fill(fields)
        self._press("Validate")
        return self._arrived("validations")

    def read(self, path: str, *, until: str = "") -> str:
        """Text of a page, once `until` stands on it."""
        self.open(path)
        body = self.page.locator("main")
        if until:
            expect(body).to_contain_text(until, timeout=WAIT_MS)
        return body.inner_text()

    def _choose_engine(self, engine: str) -> None:
        """Choose it, and wait until the options are its own: those that stood there are taken away."""
        if self.page.input_value("#id_engine") != engine:
            self.page.select_option("#id_engine", engine)
        heading = f"Options of {TABLES[engine].title}"
        expect(self.page.locator("#engine-options")).to_contain_text(heading, timeout=WAIT_MS)

    def _fill(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        field = self.page.locator(f"[name={name}]")
        kind = field.evaluate("field => field.type")
        if kind == "checkbox":
            field.set_checked(bool(value))
        elif kind.startswith("select"):
            label = isinstance(value, str) and name == "model"
            field.select_option(label=value) if label else field.select_option(_words(value))
        else:
            field.fill(_words(value))

    def _press(self, words: str) -> None:
        self.page.get_by_role("button", name=words, exact=True).click()
        self.page.wait_for_load_state()

    def _arrived(self, kind: str) -> str:
        """Id of what was made: its page is where one is led to."""
        found = re.search(rf"/{kind}/({_ID.pattern})$", self.page.url)
        assert found is not None, f"{self.page.url}: {self._wrong()}"
        return found.group(1)

    def _wrong(self) -> str:
        said = self.page.locator("[role=alert], .errorlist, .error").all_inner_texts()
        return "; ".join(said) or self.page.locator("main").inner_text()[:1000]


def _words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
