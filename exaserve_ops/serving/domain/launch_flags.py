"""Flags of engines that become no option of a deployment: what it says otherwise, and what the fleet does."""

from __future__ import annotations

from workers.protocol.engines.sglang import SGLANG
from workers.protocol.engines.vllm import VLLM

MODEL_FLAGS = {VLLM: ("--model", "--model-tag"), SGLANG: ("--model", "--model-path")}
SERVED_FLAG = "--served-model-name"
NODES_FLAGS = {VLLM: ("--nnodes", "-n"), SGLANG: ("--nnodes",)}
_LONG = {"-r": "--node-rank"}
"""Short forms of what the fleet decides; other engines have none."""
_RANKS = "given by the fleet: it starts the ranks of a replica together and numbers them"
_RENDEZVOUS = "given by the fleet: the first node's address, and a port that its agent leases"
_WITH_VALUE = {
    "--host": "its agent chooses the address",
    "--port": "its agent leases the ports",
    "--uds": "replicas are reached by address and port",
    "--node-rank": _RANKS,
    "--dist-init-addr": _RENDEZVOUS,
    "--nccl-init-addr": _RENDEZVOUS,
    "--master-addr": _RENDEZVOUS,
    "--master-port": _RENDEZVOUS,
    "--nccl-port": "its agent leases the ports",
    "--download-dir": "weights come from the model that is registered here",
    "--tokenizer": "the tokenizer comes with the model that is registered here",
    "--api-server-count": "one API server answers for each replica",
    "--disaggregation-mode": "replicas that only prefill or only decode are not offered",
}
_ALONE = {
    "--headless": _RANKS,
    "--enable-metrics": "metrics are always on",
    "--disable-log-stats": "metrics are always on",
    "--enable-log-outputs": "what an engine answers is not written to logs here",
    "--disable-log-requests": "requests are not logged unless asked for",
    "--disable-uvicorn-access-log": "one line for each request costs little",
}


def long_form(flag: str) -> str:
    """A short form of what the fleet decides as it is called; others as they are."""
    return _LONG.get(flag, flag)


def becomes_nothing(flag: str) -> str:
    """Why a flag is left out; empty if it is not."""
    return _WITH_VALUE.get(flag) or _ALONE.get(flag, "")


def stands_alone(flag: str) -> bool:
    """Whether such a flag takes no value: the word behind it is something else."""
    return flag in _ALONE
