"""Make an API key from a shell, for the first one and for automation."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from exaserve_ops.access.models import Scope
from exaserve_ops.access.services import create_api_key
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import OpsError

ACTOR = "shell"


class Command(BaseCommand):
    """Prints the key, and nothing else, to standard output: `KEY=$(manage.py create_api_key …)`."""

    help = "Make an API key and print its text, which cannot be had again."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("--user", required=True, help="whose rights the key has")
        parser.add_argument("--name", required=True, help="who or what uses it")
        parser.add_argument(
            "--scope", action="append", choices=Scope.values, help="may be given twice; default: api"
        )
        parser.add_argument("--days", type=float, help="days until it ends; default: never")

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Make the key."""
        user = get_user_model().objects.filter(username=options["user"]).first()
        if user is None:
            raise CommandError(f"no user '{options['user']}'; make one with `manage.py createsuperuser`")
        if options["days"] is not None and options["days"] <= 0:
            raise CommandError("--days must be above zero")
        now = clock.now()
        try:
            _, text = create_api_key(
                user=user,
                name=options["name"],
                scopes=options["scope"] or [Scope.API],
                actor=ACTOR,
                now=now,
                expires_at=now + timedelta(days=options["days"]) if options["days"] else None,
            )
        except OpsError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(text)
