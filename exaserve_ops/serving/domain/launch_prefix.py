"""What stands before the command of an engine: a container, a starter of ranks, a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol.confidential import MASK

CONTAINERS = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot")
_STARTERS = ("srun", "sbatch", "salloc", "mpirun", "mpiexec", "orterun", "prun", "torchrun", "pdsh", "ray")
_VARIABLE = ("-e", "--env")
_USER = ("-u", "--user")
_TAKES_NEXT = (*_VARIABLE, *_USER, "--env-file")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What it says."""

    said: str = ""
    """Without variables and interpreters; empty for nothing."""
    became: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that a container is given."""
    unknown: tuple[str, ...] = ()
    """What gives it others, which are not known here: a file, or what the shell had."""
    secrets: tuple[str, ...] = ()
    """Passwords of users."""


def read_prefix(words: Sequence[str]) -> Prefix:
    """Read the words before what starts an engine."""
    said: list[str] = []
    environment: list[tuple[str, str]] = []
    unknown: list[str] = []
    secrets: list[str] = []
    in_container = any(_name_of(word) in CONTAINERS for word in words)
    place = 0
    while place < len(words) and not _name_of(words[place]).startswith("python"):
        word, following = words[place], words[place + 1] if place + 1 < len(words) else ""
        variable = _variable(word, following) if in_container else ""
        if variable:
            name, equals, value = variable.partition("=")
            environment += [(name, value)] if equals else []
            unknown += [] if equals else [f"{_VARIABLE[0]} {name}"]
        elif word.startswith("--env-file"):
            unknown.append(word if "=" in word else f"{word} {following}")
        elif word in _USER and ":" in following:
            said += [word, MASK]
            secrets.append(following.partition(":")[2])
        else:
            said.append(word)
            following = ""
        place += 2 if in_container and word in _TAKES_NEXT and following else 1
    became = f"nothing: {_why_not(_name_of(said[0]))}" if said else ""
    return Prefix(" ".join(said), became, tuple(environment), tuple(unknown), tuple(secrets))


def _variable(word: str, following: str) -> str:
    """`NAME=value` of `-e NAME=value`, `--env=NAME=value` or `-eNAME=value`; empty if it is none."""
    if word in _VARIABLE:
        return following
    if word.startswith("--env="):
        return word.removeprefix("--env=")
    return word.removeprefix("-e") if word.startswith("-e") and "=" in word else ""


def _name_of(word: str) -> str:
    return word.rpartition("/")[2]


def _why_not(starter: str) -> str:
    if starter in _STARTERS:
        return (
            "the fleet starts the ranks of a replica together; on how many nodes, nodes_per_replica says "
            "(--nnodes)"
        )
    if starter in CONTAINERS:
        return "engines run in an environment of their node, not in a container"
    return "a node's agent starts the engine itself"
