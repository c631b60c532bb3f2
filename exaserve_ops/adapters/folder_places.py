"""Folders of this machine that somebody names: where they really lie, what is in them, what stays here.

What is registered goes to every node, so a folder is looked at as a stranger would name it: links are
followed before anything is decided, and what cannot be read is an answer, never a fault of the product.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from exaserve_ops.lib.errors import InvalidInputError

_KEY_NAME = re.compile(
    r".+\.(pem|key|p12|pfx|jks|kdbx)|id_(rsa|dsa|ecdsa|ed25519)(\.pub)?|identity\.json|credentials(\.json)?",
    re.IGNORECASE,
)
"""Names that keys have, and nothing that engines read."""


def find_folder(folder: str) -> Path:
    """Where a folder really lies, all links followed. Raises `InvalidInputError`."""
    real = None
    try:
        real = Path(os.path.realpath(folder, strict=True))
        is_folder = Path(folder).is_absolute() and real.is_dir()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        is_folder = False
    except OSError as error:
        raise unreadable(error, folder) from error
    if real is None or not is_folder:
        raise InvalidInputError(
            "folder", f"there is no folder '{folder}' on this machine: give the absolute path of one"
        )
    return real


def refuse_private(folder: str, private: Sequence[Path]) -> None:
    """Refuse a folder that is, holds, or lies in one of the product's own. Raises `InvalidInputError`."""
    real = find_folder(folder)
    for own in private:
        kept = Path(os.path.realpath(own))
        if real.is_relative_to(kept) or kept.is_relative_to(real):
            raise InvalidInputError(
                "folder", f"'{folder}' has to do with the product's own secrets: nothing of it goes to nodes"
            )


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files that do not hide, nor lie in a folder that does; links that lead to such files, too.

    Raises `InvalidInputError` for what cannot be listed, links to folders, and names that keys have.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    try:
        for parent, folders, files in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            linked = [name for name in folders if Path(parent, name).is_symlink()]
            if linked:
                raise InvalidInputError("folder", f"'{Path(parent, linked[0])}' is a link to a folder")
            for name in files:
                file = Path(parent, name)
                if not name.startswith(".") and file.is_file():
                    _refuse_key(file)
                    yield file
    except OSError as error:
        raise unreadable(error, str(folder)) from error


def unreadable(error: OSError, folder: str) -> InvalidInputError:
    """What to tell whoever named a folder that this process may not, or cannot, read."""
    where = error.filename if isinstance(error.filename, str) else folder
    return InvalidInputError("folder", f"'{where}' cannot be read: {error.strerror or 'it is out of reach'}")


def _refuse_key(file: Path) -> None:
    if _KEY_NAME.fullmatch(file.name):
        raise InvalidInputError(
            "folder", f"'{file}' has the name of a key: take it out, since all files here go to nodes"
        )
