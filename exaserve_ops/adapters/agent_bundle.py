"""What is copied to a node: the agent's package and its requirements, as one archive.

The same tree makes the same bytes, so its digest names a version: what is there already is not sent again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = "requirements-agent.txt"
_PACKAGE = "workers"
_VERSION = re.compile(r'^AGENT_VERSION = "(?P<version>[\w.+-]+)"$', re.MULTILINE)
_DIGEST_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class AgentBundle:
    """An archive (tar.gz) with `workers/` and the requirements."""

    version: str
    """`<agent version>-<digest>`: the name of its folder on a node."""
    requirements_digest: str
    data: bytes


def build_bundle(tree: Path) -> AgentBundle:
    """Pack the agent out of a source tree. Raises `FileNotFoundError` where the tree has none."""
    files = sorted(p for p in (tree / _PACKAGE).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    requirements = (tree / REQUIREMENTS).read_bytes()
    found = _VERSION.search((tree / _PACKAGE / "agent" / "__init__.py").read_text())
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in (*files, tree / REQUIREMENTS):
            tar.addfile(_entry(path, tree), io.BytesIO(path.read_bytes()))
    plain = archive.getvalue()
    digest = hashlib.sha256(plain).hexdigest()[:_DIGEST_CHARACTERS]
    return AgentBundle(
        version=f"{found['version'] if found else '0'}-{digest}",
        requirements_digest=hashlib.sha256(requirements).hexdigest()[:_DIGEST_CHARACTERS],
        data=gzip.compress(plain, mtime=0),
    )


def wheels_in(folder: Path | None) -> tuple[Path, ...]:
    """Wheels of a wheelhouse, by name; none where there is no wheelhouse."""
    return tuple(sorted(folder.glob("*.whl"))) if folder is not None else ()


def _entry(path: Path, tree: Path) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.relative_to(tree).as_posix())
    entry.size = path.stat().st_size
    entry.mode = 0o644
    entry.mtime = 0  # the same tree, the same bytes
    return entry
