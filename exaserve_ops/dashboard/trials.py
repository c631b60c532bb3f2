"""What pages say of a deployment that is a validation's: nobody else changes it."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpRequest

from exaserve_ops.serving.domain.lifecycle import ACTIVE
from exaserve_ops.serving.domain.trials import is_private, refusal_of_change
from exaserve_ops.serving.models import Deployment
from exaserve_ops.validation.models import Validation


@dataclass(frozen=True, slots=True)
class Trial:
    """That a deployment is there to try an engine in."""

    validation: Validation | None
    """Whose it is; none once that has let it go."""
    is_held: bool
    """Whether it is not being deleted yet."""


def trial_of(deployment: Deployment) -> Trial | None:
    """What a trial's page says; `None` of all other deployments."""
    if not is_private(deployment.served_name):
        return None
    validation = Validation.objects.select_related("model").filter(trial=deployment).first()
    return Trial(validation, is_held=deployment.status == ACTIVE)


def is_kept_from_people(request: HttpRequest, deployment: Deployment) -> bool:
    """Whether a page that would change a deployment is not shown since it is a trial; visitors are told why.

    What is posted all the same is refused by the services, and shown with their reason.
    """
    if request.method == "POST":
        return False
    why = refusal_of_change(deployment.name, deployment.served_name)
    if why:
        messages.error(request, f"Not done: {why}.")
    return bool(why)
