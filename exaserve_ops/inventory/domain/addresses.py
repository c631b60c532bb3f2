"""Whether gateways may be sent to the address that a node says it is reached by."""

from __future__ import annotations

from workers.protocol.addresses import Outcome, assess_address

ALLOW_SETTING = "EXAOPS_ALLOW_LOCAL_ADDRESSES"


def address_problem(address: str, *, allow_local: bool) -> str:
    """Why nobody can be sent there, and what to do about it; empty for a usable address.

    `allow_local`: whether loopback and link-local addresses mean something, since all is on one machine.
    """
    verdict = assess_address(address, allow_local=allow_local)
    if verdict.outcome is Outcome.ACCEPT:
        return ""
    reason = verdict.reason.removesuffix(", and where the node comes from is not known")
    return (
        f"{reason}. Start the agent with --address and the address at which gateways reach this host "
        f"({ALLOW_SETTING}=on allows local ones, for a fleet on a single machine)."
    )
