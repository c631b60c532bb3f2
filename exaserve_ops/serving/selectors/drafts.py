"""Which registered model a pasted launch means."""

from __future__ import annotations

from exaserve_ops.serving.domain.launch_import import Draft
from exaserve_ops.serving.models import Model


def find_model(draft: Draft) -> Model | None:
    """The model of that name or folder; else the only one whose name ends alike. `None`: no or several."""
    if not draft.model:
        return None
    for fitting in (
        Model.objects.filter(name=draft.model),
        Model.objects.filter(source=f"file://{draft.model}"),
        Model.objects.filter(name=draft.model.rpartition("/")[2]),
        Model.objects.filter(name__endswith="/" + draft.model.rpartition("/")[2]),
    ):
        found = list(fitting[:2])
        if len(found) == 1:
            return found[0]
    return None
