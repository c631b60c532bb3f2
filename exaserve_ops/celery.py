"""The control plane's Celery app: chores. Agents have an app of their own that knows no Django."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "exaserve_ops.settings.dev")

app = Celery("exaserve_ops")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
