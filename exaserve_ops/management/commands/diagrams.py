"""Write `docs/lifecycles.md` out of the lifecycle tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from exaserve_ops.health.domain.incident import INCIDENT
from exaserve_ops.inventory.domain.drain import NODE_DRAIN
from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.lifecycle import Lifecycle
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.model_import import MODEL_IMPORT
from exaserve_ops.sessions.domain.moves import RELOCATION
from exaserve_ops.validation.domain.lifecycle import CHECK, VALIDATION

LIFECYCLES = (
    DEPLOYMENT,
    REPLICA,
    NODE_LIVENESS,
    NODE_DRAIN,
    INCIDENT,
    INSTALLATION,
    RELOCATION,
    ROLLOUT,
    WAVE,
    MODEL_IMPORT,
    VALIDATION,
    CHECK,
)

_HEAD = """\
# Lifecycles

Written by `python manage.py diagrams` out of the tables that the code runs on; a test holds it current.
Statuses move by events only, each under the row's lock, each leaving one audit event.
"""


class Command(BaseCommand):
    """The document is generated, so that it cannot say anything but the truth."""

    help = "Write docs/lifecycles.md; with --check, say whether it is current."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("--check", action="store_true", help="write nothing; fail if it is not current")
        parser.add_argument("--file", type=Path, default=settings.BASE_DIR / "docs" / "lifecycles.md")

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Write or check."""
        file: Path = options["file"]
        text = render(LIFECYCLES)
        if not options["check"]:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            raise CommandError(f"{file.name} is not current; run `python manage.py diagrams`")


def render(lifecycles: Iterable[Lifecycle]) -> str:
    """Return the document as Markdown."""
    return "\n".join([_HEAD, *(_section(lifecycle) for lifecycle in lifecycles)])


def _section(lifecycle: Lifecycle) -> str:
    rows = [f"| `{status}` | {lifecycle.meanings[status]} |" for status in lifecycle.statuses]
    lines = [
        f"## {lifecycle.name.capitalize()}",
        "",
        "```mermaid",
        lifecycle.mermaid(),
        "```",
        "",
        "| status | meaning |",
        "|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)
