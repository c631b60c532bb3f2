"""Make what a fleet on one machine needs in the database. Run again, it adds what is missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.core.management.base import BaseCommand, CommandError

from exaserve_ops.access.models import Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.access.services import create_api_key
from exaserve_ops.adapters.fleet_files import FleetFiles, open_fleet_files, write_private
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import create_join_token
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.management.allinone.readiness import DEMO_MODEL
from exaserve_ops.serving.services.models import register_model

ADMIN = "admin"
ACTOR = "up"


class Command(BaseCommand):
    """Administrator, key, join tokens, demo model. Secrets go into private files, not to output."""

    help = "Make administrator, API key, join tokens and the demo model's entry, where missing."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "--node", action="append", default=[], metavar="NAME=ID", help="a node that shall join"
        )
        parser.add_argument("--model", type=Path, help="folder of the demo model")

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Do each part that has not been done."""
        files = open_fleet_files(settings.ENV.var_dir)
        try:
            admin = _ensure_admin(files)
            _ensure_key(files, admin)
            for node in options["node"]:
                name, _, known_id = node.partition("=")
                _ensure_may_join(files, name, known_id)
            if options["model"]:
                facts = ModelFolder().read(str(options["model"].absolute()))
                register_model(name=DEMO_MODEL, facts=facts, actor=ACTOR, now=clock.now())
        except OpsError as error:
            raise CommandError(str(error)) from error
        self.stdout.write("ready")


def _ensure_admin(files: FleetFiles) -> AbstractBaseUser:
    users = get_user_model().objects
    known = users.filter(username=ADMIN).first()
    if known is not None:
        return known
    return users.create_superuser(username=ADMIN, password=files.secret("admin_password"))


def _ensure_key(files: FleetFiles, admin: AbstractBaseUser) -> None:
    """Keep the key in a file; make a new one if the database does not know it (any more)."""
    path = files.secret_path("api_token")
    now = clock.now()
    if path.exists() and find_valid_key(path.read_text().strip(), Scope.API, now=now) is not None:
        return
    _, text = create_api_key(user=admin, name="up", scopes=(Scope.API, Scope.INFERENCE), actor=ACTOR, now=now)
    write_private(path, text)


def _ensure_may_join(files: FleetFiles, name: str, known_id: str) -> None:
    """Leave a token for a node that has to join, which one unknown to this database has to again."""
    if known_id and Node.objects.filter(pk=UUID(known_id)).exists():
        return
    (files.node_home(name) / "identity.json").unlink(missing_ok=True)
    _, text = create_join_token(actor=ACTOR, now=clock.now(), note=f"{name} of this machine")
    write_private(files.secret_path(f"join-{name}"), text)
