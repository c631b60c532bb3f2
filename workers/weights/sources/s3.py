"""S3-compatible stores, by the client of MinIO, which is imported only where such a source is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from urllib3.exceptions import HTTPError

from workers.weights.sources.answers import busy_seconds
from workers.weights.sources.guard import ForbiddenPlaceError, pool_manager
from workers.weights.sources.http import BodyReader, give_back
from workers.weights.sources.port import BusyError, MissingFileError, RefusedError, SourceError

_MISSING_CODES = frozenset({"NoSuchKey", "NoSuchBucket", "InvalidRange"})
_REFUSED_CODES = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"})
_BUSY_CODES = frozenset({"SlowDown", "TooManyRequests", "RequestLimitExceeded"})


class S3Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The secret of an S3 source, as JSON."""

    endpoint: str = "https://s3.amazonaws.com"
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    region: str = "us-east-1"


class S3Source:
    """Implements the port for `s3://bucket/prefix`."""

    kind = "s3"

    def __init__(self, location: str, secret: str, *, allow_local: bool = False) -> None:
        """Take an address and the JSON of its secret. Raises `SourceError`."""
        parts = urlsplit(location)
        if parts.scheme != "s3" or not parts.netloc:
            raise SourceError(f"{location!r} is not s3://bucket/prefix")
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self.name = f"s3://{self._bucket}"
        self._client = connect(secret, allow_local=allow_local)

    @contextmanager
    def open_range(self, path: str, offset: int, length: int) -> Iterator[BodyReader]:
        """Ask for a range of an object. Raises `SourceError`."""
        what = f"{self.name}/{self._prefix}/{path}"
        with said_plainly(what):
            answer = self._client.get_object(
                self._bucket, f"{self._prefix}/{path}", offset=offset, length=length
            )
        try:
            yield BodyReader(answer, what)
        finally:
            give_back(answer)

    def close(self) -> None:
        """Connections close with the client."""


@contextmanager
def said_plainly(what: str) -> Iterator[None]:
    """Turn what the client raises into a `SourceError`."""
    from minio.error import MinioException, S3Error  # noqa: PLC0415 - optional, and slow to import

    try:
        yield
    except S3Error as error:
        raise _translated(what, str(error.code)) from error
    except ForbiddenPlaceError as error:
        raise RefusedError(f"{what}: {error}") from error
    except (MinioException, HTTPError, OSError, ValueError) as error:
        raise SourceError(f"{what}: {type(error).__name__}") from error


def connect(secret: str, *, allow_local: bool) -> Any:  # noqa: ANN401 - of a library that may not be there
    """Make a client by the JSON of a secret. Raises `SourceError`."""
    try:
        from minio import Minio  # noqa: PLC0415 - optional
    except ImportError as error:
        raise SourceError("S3 needs the package `minio`: pip install -r requirements-agent.txt") from error
    try:
        told = msgspec.json.decode(secret, type=S3Secret) if secret else S3Secret()
    except msgspec.DecodeError:
        # Not chained: the text of the error might quote the secret.
        raise RefusedError(
            "the secret is no JSON with endpoint, access_key, secret_key, session_token and region"
        ) from None
    endpoint = urlsplit(told.endpoint)
    return Minio(
        endpoint.netloc,
        access_key=told.access_key or None,
        secret_key=told.secret_key or None,
        session_token=told.session_token or None,
        region=told.region,
        secure=endpoint.scheme == "https",
        http_client=pool_manager(redirects=0, allow_local=allow_local),
    )


def _translated(what: str, code: str) -> SourceError:
    if code in _MISSING_CODES:
        return MissingFileError(f"{what}: {code}")
    if code in _REFUSED_CODES:
        return RefusedError(f"{what}: {code}")
    if code in _BUSY_CODES:
        return BusyError(f"{what}: {code}", busy_seconds(""))
    return SourceError(f"{what}: {code}")
