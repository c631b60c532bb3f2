"""Says which packages an engine's options need and it does not have, before it starts without them."""

from __future__ import annotations

import importlib.util
import os

ENV_NEEDS = "EXAOPS_ENGINE_NEEDS"
"""Names of modules, with blanks between."""


def objection() -> str:
    """Why the engine cannot start as it was asked to; empty if it can."""
    missing = [name for name in os.environ.get(ENV_NEEDS, "").split() if not importlib.util.find_spec(name)]
    if not missing:
        return ""
    names = ", ".join(missing)
    return (
        f"{names}: not installed in this engine's environment, and an option of the deployment needs it: "
        f"install {names} there, or leave the option out"
    )
