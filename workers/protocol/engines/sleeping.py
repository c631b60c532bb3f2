"""Sleep of engines: which can, by which option, and the states that an agent tells."""

from __future__ import annotations

from collections.abc import Mapping

from workers.protocol.engines.own import SIMULATED, TORCH
from workers.protocol.engines.sglang import SGLANG
from workers.protocol.engines.vllm import VLLM

AWAKE, FALLING_ASLEEP, ASLEEP, WAKING = "", "falling_asleep", "asleep", "waking"
STATES = (AWAKE, FALLING_ASLEEP, ASLEEP, WAKING)

_SWITCHES = {VLLM: "enable_sleep_mode", SGLANG: "enable_memory_saver", SIMULATED: "enable_sleep_mode"}
"""Option that an engine has to be started with."""


def can_sleep(engine: str, options: Mapping[str, object]) -> bool:
    """Whether an engine with these options can give its memory back and take it again."""
    return not why_no_sleep(engine, options)


def why_no_sleep(engine: str, options: Mapping[str, object]) -> str:
    """Why an engine with these options cannot sleep, and what to do; empty where it can."""
    if engine == TORCH:
        return (
            "the built-in engine does not sleep: blocks of its node's pool that a standby does not use are"
            " lent to its neighbours already"
        )
    switch = _SWITCHES.get(engine)
    if switch is None:
        return f"engine {engine!r} does not sleep"
    return "" if options.get(switch) else f"its engine sleeps only with the option {switch}"
