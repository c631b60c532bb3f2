"""The fleet's own HTTP faces, as `up` and anybody else may ask them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

_TIMEOUT_SECONDS = 5.0
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class RestClient:
    """Asks one base address, with one key."""

    base_url: str
    token: str = ""
    timeout_seconds: float = _TIMEOUT_SECONDS

    def get_all(self, path: str) -> list[dict[str, Any]]:
        """Return all items of a paginated list. Raises `OSError` or `ValueError` if it has none."""
        items: list[dict[str, Any]] = []
        url: str | None = self.base_url + path
        while url:
            page = json.loads(self._request(url))
            items += page["results"]
            url = page.get("next")
        return items

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer to a POST. Raises `OSError` or `ValueError`."""
        answer = json.loads(self._request(self.base_url + path, json.dumps(content).encode()))
        return dict(answer)

    def unreachable(self, path: str) -> str:
        """Return why nobody answers there; nothing if somebody does, even with a refusal."""
        try:
            self._request(self.base_url + path)
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}" if error.code >= _SERVER_ERROR else ""
        except OSError as error:
            return str(getattr(error, "reason", error))
        return ""

    def _request(self, url: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - http, ours
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self.timeout_seconds) as answer:
            content: bytes = answer.read()
        return content
