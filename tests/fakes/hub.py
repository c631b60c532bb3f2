"""A hub on loopback: branches, commits, pages of files, and the ways in which hubs say no."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.weight_servers import FileServer

COMMIT = "c0ffee" * 6 + "c0ff"
OTHER_COMMIT = "beef" * 10
_LARGE_BYTES = 10_000
_PAGE = 3


@dataclass
class HubServer(FileServer):
    """One model, `o/n`. `contents` are its files by path; large ones have the SHA-256 that LFS has."""

    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    error_code: str = ""
    """Said with a refusal, as `X-Error-Code`."""
    refuse_first: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Status and headers of the next answers; then all is well."""
    lies: dict[str, str] = field(default_factory=dict)
    """SHA-256 that is told of a file instead of the right one."""
    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    """Files of other commits."""

    @property
    def location(self) -> str:
        return f"{self.address}/o/n"

    def asked_for(self, part: str) -> list[str]:
        """Paths with this in them that were asked for."""
        return [path for path, _ in self.asked if part in path]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path).lstrip("/")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((path, headers))
        refusal = self.status or self._refusal(headers)
        extra = {"X-Error-Code": self.error_code} if self.error_code else {}
        if self.refuse_first:
            refusal, more = self.refuse_first.pop(0)
            extra |= more
        if refusal:
            self._send(request, refusal, b"{}", extra)
        elif path.startswith("api/models/o/n/"):
            self._tell(request, path.removeprefix("api/models/o/n/"), parse_qs(parts.query))
        else:
            self._give_file(request, path, headers.get("range", ""))

    def _tell(self, request: BaseHTTPRequestHandler, asked: str, query: Mapping[str, list[str]]) -> None:
        kind, _, revision = asked.partition("/")
        commit = self.branches.get(revision, revision if revision in self.branches.values() else "")
        if not commit:
            self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            self._send(request, 200, json.dumps({"sha": commit, "siblings": []}).encode())
        else:
            entries = [self._entry(path, content) for path, content in self._files(commit).items()]
            entries.append({"type": "directory", "path": "folder", "oid": "0" * 40, "size": 0})
            begin = int(query.get("cursor", ["0"])[0])
            extra = {}
            if begin + _PAGE < len(entries):
                url = f"{self.address}/api/models/o/n/tree/{commit}?recursive=true&cursor={begin + _PAGE}"
                extra = {"Link": f'<{url}>; rel="next"'}
            self._send(request, 200, json.dumps(entries[begin : begin + _PAGE]).encode(), extra)

    def _files(self, commit: str) -> Mapping[str, bytes]:
        return self.commits.get(commit, self.contents)

    def _entry(self, path: str, content: bytes) -> dict[str, object]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if len(content) < _LARGE_BYTES:
            return {"type": "file", "path": path, "size": len(content), "oid": git}
        sha256 = self.lies.get(path, hashlib.sha256(content).hexdigest())
        lfs = {"oid": sha256, "size": len(content), "pointerSize": 135}
        pointer = hashlib.sha1(sha256.encode(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": pointer, "lfs": lfs}

    def _give_file(self, request: BaseHTTPRequestHandler, path: str, wanted: str) -> None:
        commit, _, name = path.removeprefix("o/n/resolve/").partition("/")
        content = self._files(commit).get(name)
        if content is None or commit not in self.branches.values():
            self._send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            self._give(request, content, wanted)
