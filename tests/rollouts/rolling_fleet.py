"""A whole fleet of real engines that rolls: asked for as people do, killed in as the world does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up
from tests.rollouts.talking import Load

CODE = Path(__file__).resolve().parents[2]
NODES = 3
QUICK: dict[str, Any] = {
    "canary_soak_seconds": 4,
    "soak_seconds": 2,
    "min_requests": 5,
    "warm_up_seconds": 2,
    "sessions_wait_seconds": 15,
}
PATIENT: dict[str, Any] = QUICK | {"max_ttft_ratio": 4, "max_itl_ratio": 4}
"""For good releases on a machine that has much else to do: starting engines takes all of its cores."""
DOES_NOT_START: dict[str, Any] = {"extra_arguments": "--no-such-flag"}
"""Options that nobody but the engine itself can refuse."""
LONGEST_SECONDS = 400.0
LOOK_SECONDS = 0.3

Json = dict[str, Any]


@dataclass(frozen=True)
class RollingFleet:
    """A running fleet with one deployment, the demo."""

    run: FleetRun
    api: httpx.Client

    # -- reading ----------------------------------------------------------------------------------------
    @property
    def summary(self) -> Json:
        """What `up` wrote of it."""
        return self.run.summary()

    def get(self, path: str, **parameters: str | int) -> Any:
        """An answer of the API, asked again while it is away. Raises `FleetRunError`."""
        found: list[Any] = []

        def answered() -> bool:
            with contextlib.suppress(httpx.TransportError):
                answer = self.api.get(path, params=parameters)
                if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    found.append(answer.raise_for_status().json())
            return bool(found)

        self.run.wait_until(answered, f"an answer to GET {path}")
        return found[-1]

    def deployment(self) -> Json:
        """The demo."""
        found: Json = next(one for one in self.get("/deployments")["results"] if one["name"] == "demo")
        return found

    def rollout(self, key: str) -> Json:
        """One rollout with its waves."""
        found: Json = self.get(f"/rollouts/{key}")
        return found

    def replicas(self) -> list[Json]:
        """Those that are meant to run."""
        rows = self.get("/replicas", page_size=500)["results"]
        return [row for row in rows if row["wanted"] == "run" and row["deployment_name"] == "demo"]

    def models_by_replica(self) -> dict[str, str]:
        """Name of the model of every replica that ever was."""
        releases = {one["id"]: one["model_name"] for one in self.get("/releases", page_size=500)["results"]}
        rows = self.get("/replicas", page_size=500, ended="true")["results"]
        return {row["id"]: releases[row["release"]] for row in rows}

    def release_numbers(self) -> dict[str, int]:
        """Number of the release of every replica that ever was."""
        rows = self.get("/replicas", page_size=500, ended="true")["results"]
        return {row["id"]: row["release_number"] for row in rows}

    def events(self, **parameters: str | int) -> list[Json]:
        """Events of that kind, the newest first."""
        found: list[Json] = self.get("/events", page_size=500, **parameters)["results"]
        return found

    def load(self, **shape: int) -> Load:
        """Conversations that begin on entering. `shape`: `turns` of each, and `words` of a turn."""
        return Load(self.summary["gateway_url"], self.summary["api_token"], **shape)

    # -- asking for rollouts ----------------------------------------------------------------------------
    def register(self, name: str, folder: Path) -> Json:
        """Register a model, however long its hashing takes."""
        found: list[Json] = []

        def registered() -> bool:
            answer = self.api.post("/models", json={"name": name, "folder": str(folder)})
            if answer.status_code in {httpx.codes.OK, httpx.codes.CREATED}:
                found.append(answer.json())
            assert answer.status_code < httpx.codes.BAD_REQUEST, answer.text
            return bool(found)

        self.run.wait_until(registered, f"{name} is registered")
        return found[0]

    def by_rest(self, policy: Mapping[str, Any], *, model: str = "", **options: Any) -> str:
        """Read the plan and ask for it over REST; returns its id. `options`: changes of the engine's."""
        now = self.deployment()
        wish = {
            "deployment": now["id"],
            "model": model or now["model"],
            "engine_options": now["engine_options"] | options,
            "policy": dict(policy),
        }
        plan = self.api.post("/rollouts/plan", json=wish).json()
        assert "digest" in plan, plan
        asked = self.api.post("/rollouts", json=wish | {"plan": plan["digest"], "reason": "try"})
        assert asked.status_code == httpx.codes.CREATED, asked.text
        return str(asked.json()["id"])

    def by_page(self, policy: Mapping[str, Any], *, model: str = "", **options: Any) -> str:
        """Fill in the form, read the plan, confirm it; returns the rollout's id."""
        now = self.deployment()
        lines = [f"{name} = {value}" for name, value in (now["engine_options"] | options).items()]
        usual = {
            "max_surge": "1", "max_unavailable": "1", "canary": "1", "growth": "100%",
            "max_error_percent": 2, "max_ttft_ratio": 1.5, "max_itl_ratio": 1.5,
            "on_failure": "roll_back", "move_sessions": "on",
        }  # fmt: skip
        form = usual | dict(policy)
        form |= {
            "model": model or now["model"],
            "engine_options": "\n".join(lines),
            "reason": "from the page",
        }
        with self._signed_in() as browser:
            path = f"/deployments/{now['id']}/rollout"
            return self._plan_and_confirm(browser, path, form, {"step": "plan"}, {"step": "begin"})

    def by_admin(self, policy: Mapping[str, Any], *, model: str = "", **options: Any) -> str:
        """Choose the action on the deployment, read the plan, confirm it; returns the rollout's id."""
        now = self.deployment()
        listing = "/admin/serving/deployment/"
        with self._signed_in() as browser:
            page = browser.get(listing).raise_for_status().text
            chosen = {
                "action": "roll_out",
                "_selected_action": now["id"],
                "csrfmiddlewaretoken": token_of(page),
            }
            led = browser.post(listing, data=chosen)
            assert led.status_code == httpx.codes.FOUND, led.text[:500]
            form = {
                "model": model or now["model"],
                "engine_options": as_json(now["engine_options"] | options),
                "policy": as_json(policy),
                "reason": "from the admin",
            }
            return self._plan_and_confirm(
                browser, led.headers["location"], form, {"_plan": "1"}, {"_begin": "1"}
            )

    def _plan_and_confirm(self, browser: httpx.Client, path: str, form: Json, plan: Json, begin: Json) -> str:
        csrf = {"csrfmiddlewaretoken": token_of(browser.get(path).raise_for_status().text)}
        seen = browser.post(path, data=form | csrf | plan)
        planned = re.search(r'name="planned" value="([^"]+)"', seen.text)
        assert planned is not None, seen.text[-3000:]
        begun = browser.post(path, data=form | csrf | begin | {"planned": planned.group(1)})
        assert begun.status_code == httpx.codes.FOUND, begun.text[-3000:]
        made = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", begun.headers["location"])
        assert made is not None, begun.headers["location"]
        return made.group(0)

    @contextmanager
    def _signed_in(self) -> Iterator[httpx.Client]:
        password = self.summary["admin_password"]
        with httpx.Client(base_url=self.summary["web_url"], timeout=60) as browser:
            browser.headers["referer"] = self.summary["web_url"]
            csrf = token_of(browser.get("/login").raise_for_status().text)
            answer = browser.post(
                "/login", data={"username": "admin", "password": password, "csrfmiddlewaretoken": csrf}
            )
            assert answer.status_code == httpx.codes.FOUND, answer.text[:500]
            yield browser

    # -- waiting ----------------------------------------------------------------------------------------
    def wait_for(self, key: str, holds: Callable[[Json], bool], what: str) -> Json:
        """Wait until something holds of a rollout; it must not end before that. Raises `FleetRunError`."""
        seen: list[Json] = [{}]

        def look() -> bool:
            time.sleep(LOOK_SECONDS)  # the fleet needs the processor more than who looks at it
            seen[0] = self.rollout(key)
            assert holds(seen[0]) or not seen[0]["ended_at"], f"it ended before {what}: {told(seen[0])}"
            return holds(seen[0])

        try:
            self.run.wait_until(look, what, seconds=LONGEST_SECONDS)
        except Exception as error:
            error.add_note(told(seen[0]))
            raise
        return seen[0]

    def end_of(self, key: str) -> Json:
        """Wait for the end of a rollout."""
        return self.wait_for(key, lambda one: bool(one["ended_at"]), "its end")

    def until_whole(self) -> None:
        """Wait until every replica that is wanted is ready."""

        def whole() -> bool:
            rows = self.replicas()
            return len(rows) == NODES and all(row["status"] == "ready" for row in rows)

        self.run.wait_until(whole, "all replicas ready", seconds=180)

    # -- killing ----------------------------------------------------------------------------------------
    def kill(self, program: str) -> int:
        """Send SIGKILL to a program of the fleet, which its supervisor starts again; returns its pid."""
        pid = int(self.summary["pids"][program])
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextmanager
    def spare_controllers(self) -> Iterator[psutil.Popen]:
        """Controllers beside the fleet's own: spares until those die."""
        own = psutil.Process(int(self.summary["pids"]["controllers"]))
        environment = own.environ()
        log = self.run.var.parent / "spare.log"
        with log.open("ab") as output:
            spare = psutil.Popen(
                [sys.executable, "manage.py", "run_controllers"],
                cwd=CODE, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            yield spare
        finally:
            if spare.poll() is None:
                spare.terminate()
                spare.wait(60)


@contextmanager
def rolling_fleet(folder: Path) -> Iterator[RollingFleet]:
    """A fleet of three nodes with one replica each; stopped on leaving, with nothing left."""
    var = folder / "var"
    run = start_fleet(CODE, var, "--nodes", str(NODES), "--replicas", "1")
    try:
        wait_until_up(run)
        summary = run.summary()
        headers = {"Authorization": f"Bearer {summary['api_token']}"}
        with httpx.Client(base_url=summary["web_url"] + "/api/v1", headers=headers, timeout=60) as api:
            yield RollingFleet(run, api)
        assert run.stop() == 0
        assert leftovers(var) == ()
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(30)
        for process in leftovers(var):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.identity.pid, signal.SIGKILL)


def told(rollout: Json) -> str:
    """How far a rollout is, for people who read a failure."""
    if not rollout:
        return "nothing is known of it"
    lines = [f"{rollout['status']}: {rollout['why']}; waits for {rollout['waits_for']}"]
    for wave in rollout["waves"]:
        lines.append(f"wave {wave['number']} {wave['status']}: {wave['why']}")
        lines += [f"  {gate['name']} {gate['state']}: {gate['why']}" for gate in wave["gates"]]
    return "\n".join(lines)


def token_of(page: str) -> str:
    """The token that a form of a page carries."""
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    assert found is not None, page[:500]
    return found.group(1)


def as_json(value: Mapping[str, Any]) -> str:
    """As people type it."""
    return json.dumps(dict(value))
