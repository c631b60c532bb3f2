"""Hubs, servers and buckets: what files they have, each asked in its own way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from workers.protocol.imports import WeightsImport
from workers.protocol.manifest import ManifestError, check_paths
from workers.protocol.shards import MAX_INDEX_BYTES
from workers.weights.imports.listing import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WHOLE,
    ListedFile,
    Lister,
    Listing,
    UnfitError,
)
from workers.weights.imports.web import WebClient
from workers.weights.secrets import SecretError, Secrets
from workers.weights.sources.port import MissingFileError, RefusedError, SourceError
from workers.weights.sources.s3 import connect, said_plainly

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_PAGES = 200
_MOST_OBJECTS = 100_000
_KNOWN_NAMES = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""What models have beside their weights, often; a server without a list is asked for each."""


def open_lister(told: WeightsImport, secrets: Secrets, *, allow_local: bool) -> Lister:
    """What asks this place. Raises `SourceError` for one that cannot be used on this node."""
    try:
        secret = secrets.read(told.secret) if told.secret else ""
    except SecretError as error:
        raise RefusedError(str(error)) from error
    match told.kind:
        case "hub":
            return HubLister(told, secret, allow_local=allow_local)
        case "http":
            return ServerLister(told, secret, allow_local=allow_local)
        case "s3":
            return BucketLister(told.location, secret, allow_local=allow_local)
        case _:
            raise SourceError(f"places of kind {told.kind!r} are not known to this agent")


class HubLister:
    """A hub: a branch or tag becomes the commit that it stands for, which never changes."""

    def __init__(self, told: WeightsImport, token: str, *, allow_local: bool) -> None:
        self._base, self._repo, revision = read_hub_address(told.location)
        self._revision = told.revision or revision or "main"
        self._web = WebClient(told.location, token=token, allow_local=allow_local)

    def list_files(self) -> Listing:
        """All files of the commit, with the digests that the hub knows."""
        what = f"{self._web.host}/{self._repo}"
        api = f"{self._base}/api/models/{quote(self._repo)}"
        try:
            commit = self._commit(api, what)
            files = tuple(self._files(f"{api}/tree/{commit}?recursive=true", what))
        finally:
            self._web.close()
        return Listing(f"{self._base}/{self._repo}/resolve/{commit}", files)

    def _commit(self, api: str, what: str) -> str:
        about, _ = self._web.get_json(f"{api}/revision/{quote(self._revision, safe='')}", what)
        commit = about.get("sha") if isinstance(about, Mapping) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise SourceError(f"{what}: the hub does not say which commit {self._revision!r} is")
        return commit

    def _files(self, url: str, what: str) -> Iterator[ListedFile]:
        for _ in range(_MOST_PAGES):
            entries, url = self._web.get_json(url, what)
            if not isinstance(entries, list):
                raise SourceError(f"{what}: the hub does not list its files")
            for entry in entries:
                if isinstance(entry, Mapping) and entry.get("type") == "file":
                    yield _of_hub(entry, what)
            if not url:
                return
        raise UnfitError(f"{what} has more than {_MOST_PAGES} pages of files")


def read_hub_address(location: str) -> tuple[str, str, str]:
    """Parts of a model's address at a hub: `(https://hub, owner/name, revision)`.

    It may go on with `/tree/<revision>` or `/resolve/<revision>`, as in a browser. Raises `SourceError`.
    """
    parts = urlsplit(location)
    words = [unquote(word) for word in parts.path.split("/") if word]
    revision = ""
    for mark in ("tree", "resolve"):
        if mark in words[1:]:
            at = words.index(mark, 1)
            words, revision = words[:at], "/".join(words[at + 1 :])
    if parts.scheme not in ("http", "https") or not parts.netloc or not 1 <= len(words) <= 2:  # noqa: PLR2004 - owner and name
        raise SourceError(f"{location!r} is no https://hub/owner/name")
    return f"{parts.scheme}://{parts.netloc}", "/".join(words), revision


def _of_hub(entry: Mapping[str, Any], what: str) -> ListedFile:
    lfs = entry.get("lfs")
    large = lfs if isinstance(lfs, Mapping) else {}
    path, size = entry.get("path"), large.get("size", entry.get("size"))
    if not isinstance(path, str) or not isinstance(size, int):
        raise SourceError(f"{what}: the hub lists a file without path or size")
    sha256 = str(large.get("oid", "")).removeprefix("sha256:")
    return ListedFile(
        path=path,
        size_bytes=size,
        sha256=sha256 if _SHA256.fullmatch(sha256) else "",
        git_sha1="" if large else str(entry.get("oid", "")),
        version=str(entry.get("oid", "")),
    )


class ServerLister:
    """A server that only gives files: the index of shards and well-known names say what to ask for."""

    def __init__(self, told: WeightsImport, token: str, *, allow_local: bool) -> None:
        self._base = told.location.rstrip("/")
        self._names = told.files
        self._web = WebClient(told.location, token=token, allow_local=allow_local)

    def list_files(self) -> Listing:
        """Files that are named, or that the server has of those that models consist of."""
        try:
            needed, optional = self._what_to_ask()
            files = [self._look(name) for name in needed]
            for name in optional:
                found = self._look_for(name)
                if found is not None:
                    files.append(found)
        finally:
            self._web.close()
        return Listing(self._base, tuple(files))

    def _what_to_ask(self) -> tuple[Sequence[str], Sequence[str]]:
        if self._names:
            patterns = [name for name in self._names if set(name) & set("*?[")]
            if patterns:
                raise UnfitError(f"a server cannot be asked which files match {patterns[0]!r}: name them")
            return _safe(self._names), ()
        index = self._look_for(INDEX)
        shards = [INDEX, *self._shards(index)] if index else [WHOLE]
        return (CONFIG, TOKENIZER, *shards), _KNOWN_NAMES

    def _shards(self, index: ListedFile) -> list[str]:
        if index.size_bytes > MAX_INDEX_BYTES:
            raise UnfitError(f"{INDEX} has {index.size_bytes:,} bytes; {MAX_INDEX_BYTES:,} are allowed")
        told, _ = self._web.get_json(f"{self._base}/{INDEX}", f"{self._web.host}/{INDEX}")
        shards = told.get("weight_map") if isinstance(told, Mapping) else None
        if not isinstance(shards, Mapping) or not shards:
            raise UnfitError(f"{INDEX} has no weight_map")
        return _safe(str(name) for name in shards.values())

    def _look_for(self, name: str) -> ListedFile | None:
        try:
            return self._look(name)
        except MissingFileError:
            return None

    def _look(self, name: str) -> ListedFile:
        size, version = self._web.size_of(f"{self._base}/{quote(name)}", f"{self._web.host}/{name}")
        return ListedFile(name, size, version=version)


def _safe(names: Iterable[str]) -> list[str]:
    """Names, once each. Raises `UnfitError` for one that leads out of the place that was named."""
    found = sorted(set(names))
    try:
        check_paths(found)
    except ManifestError as error:
        raise UnfitError(str(error)) from error
    return found


class BucketLister:
    """An S3 bucket: the objects below a prefix."""

    def __init__(self, location: str, secret: str, *, allow_local: bool) -> None:
        parts = urlsplit(location)
        if parts.scheme != "s3" or not parts.netloc or not parts.path.strip("/"):
            raise SourceError(f"{location!r} is not s3://bucket/prefix")
        self._location = location.rstrip("/")
        self._bucket, self._prefix = parts.netloc, f"{parts.path.strip('/')}/"
        self._client = connect(secret, allow_local=allow_local)

    def list_files(self) -> Listing:
        """All objects below the prefix."""
        with said_plainly(self._location):
            found = [
                ListedFile(
                    str(one.object_name).removeprefix(self._prefix),
                    int(one.size or 0),
                    version=str(one.etag or ""),
                )
                for one in islice(
                    self._client.list_objects(self._bucket, prefix=self._prefix, recursive=True),
                    _MOST_OBJECTS,
                )
                if not str(one.object_name).endswith("/")
            ]
        if not found:
            raise MissingFileError(f"{self._location}: there is nothing below this prefix")
        return Listing(self._location, tuple(found))
