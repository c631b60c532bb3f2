"""Amounts of memory are bounded where they are typed, in the unit that they are typed in."""

from __future__ import annotations

import pytest
from django import forms

from exaserve_ops.dashboard.forms import MIB, MOST_MEMORY_MIB, DeploymentForm
from exaserve_ops.dashboard.rollout_forms import RolloutForm
from exaserve_ops.dashboard.validation_forms import ValidationForm
from exaserve_ops.serving.services.deployments import BOUNDS


@pytest.mark.parametrize("form", [DeploymentForm, RolloutForm, ValidationForm])
def test_memory_fields_take_what_services_take_and_refuse_more(form: type[forms.Form]) -> None:
    assert BOUNDS["replica_memory_bytes"][1] == MOST_MEMORY_MIB * MIB
    fields = {name: field for name, field in form.base_fields.items() if name.endswith("memory_mib")}
    assert "memory_mib" in fields
    for field in fields.values():
        assert field.clean(str(MOST_MEMORY_MIB)) == MOST_MEMORY_MIB
        for too_much in (MOST_MEMORY_MIB + 1, 2**44, 2**63):
            with pytest.raises(forms.ValidationError, match=f"less than or equal to {MOST_MEMORY_MIB}"):
                field.clean(str(too_much))
