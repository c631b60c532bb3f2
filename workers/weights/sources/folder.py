"""A folder or mount that the node can read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from workers.weights.sources.port import MissingFileError, OtherSizeError, SourceError


@dataclass(slots=True)
class _FileReader:
    fd: int
    path: str
    offset: int
    end: int

    def read_into(self, memory: memoryview, /) -> None:
        view = memory
        while view:
            try:
                count = os.preadv(self.fd, [view], self.offset)
            except OSError as error:
                raise SourceError(f"{self.path}: {error.strerror}") from error
            if not count:
                size = os.fstat(self.fd).st_size
                raise OtherSizeError(
                    f"{self.path} has {size:,} bytes there; at least {self.end:,} are needed"
                )
            view, self.offset = view[count:], self.offset + count


class FolderSource:
    """Implements the port for `file:///folder`."""

    kind = "folder"

    def __init__(self, location: str) -> None:
        """Take an address. Raises `SourceError` for one that is no folder's."""
        parts = urlsplit(location)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise SourceError(f"{location!r} is not file:///folder")
        self._folder = Path(unquote(parts.path))
        self.name = str(self._folder)

    @contextmanager
    def open_range(self, path: str, offset: int, length: int) -> Iterator[_FileReader]:
        """Begin to read a file; links are followed, since what is read is checked anyway."""
        try:
            fd = os.open(self._folder / path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise MissingFileError(f"{self._folder / path} does not exist on this node") from error
        except OSError as error:
            raise SourceError(f"{self._folder / path}: {error.strerror}") from error
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_SEQUENTIAL)
            yield _FileReader(fd, path, offset, offset + length)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is kept open."""
