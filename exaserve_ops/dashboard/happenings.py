"""What happened, as people say it: words for every event that the audit record knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_OF_ANY: Mapping[str, str] = {
    "created": "was created",
    "changed": "was changed",
    "deleted": "was deleted",
    "revoked": "was revoked",
    "registered": "was registered",
}
_OF_KIND: Mapping[str, Mapping[str, str]] = {
    "node": {
        "enrolled": "joined the fleet",
        "said_hello": "introduced itself",
        "moved": "has another address",
        "process_end_asked": "is asked to end a process that it left behind",
        "process_ended": "ended a process that it left behind",
        "process_not_ended": "did not end a process",
        "address_refused": "gave an address that cannot be used",
        "reported": "is alive",
        "missed": "missed a heartbeat",
        "lost": "is dead",
        "recovered": "is back",
        "retired": "was retired",
        "cordoned": "was cordoned",
        "uncordoned": "takes new replicas again",
        "drain": "is being drained",
        "drain_changed": "has another drain deadline",
        "emptied": "is drained",
        "found_more": "is not empty after all",
        "undrain": "is back in use",
        "kv_reclaimed": "took KV blocks back from a replica whose process has ended",
        "kv_damaged": "has damaged KV blocks",
        "kv_repaired": "can lend its damaged KV blocks again",
        "degraded": "is degraded",
        "healthy_again": "is healthy again",
        "keys_revoked": "had its keys revoked",
        "lease_granted": "was granted a lease",
        "agent_restart_over_ssh": "has its agent restarted over SSH",
        "agent_restarted": "had its agent restarted",
        "weights_ready": "has weights on its disk",
        "weights_failed": "cannot have weights on its disk",
        "weights_damaged": "found damaged weights",
        "store_problem": "cannot store weights",
        "store_well": "can store weights again",
    },
    "accelerator": {
        "quarantined": "was taken out of use",
        "quarantine_lifted": "is in use again",
    },
    "replica": {
        "place": "was given a node",
        "unplace": "lost its node",
        "start_begun": "is started on all its nodes",
        "seen_waiting": "waits to be launched",
        "seen_starting": "is starting",
        "seen_loading": "is loading",
        "seen_ready": "became ready",
        "seen_backing_off": "waits to start again",
        "seen_failed": "was given up",
        "seen_stopping": "is stopping",
        "seen_stopped": "stopped",
        "write_off": "was written off with its node",
        "node_lost": "is out of reach with its node",
        "drain": "is let go, finishing its requests",
        "stop": "was told to stop",
        "cancel": "was cancelled before it ran",
        "exited": "exited",
        "handed_over": "has handed its sessions over",
        "drain_ended": "has no more time to finish its requests",
        "departure_asked": "is being left by its sessions",
        "departure_withdrawn": "keeps its sessions after all",
        "stalled": "stalled",
        "memory_awaited": "waits until its memory is free",
        "memory_wait_over": "waits for memory no longer",
        "waits": "waits for room",
        "restarted": "was restarted",
        "replaced": "is being replaced",
        "reached": "was reached by a gateway",
        "unroutable": "cannot be reached by gateways",
        "routable_again": "can be reached again",
        "promoted": "was promoted to serve",
        "stood_down": "became a standby",
        "fell_asleep": "sleeps while it stands by",
        "woke": "is awake again",
        "kept_awake": "stays awake though it is to sleep",
        "healing_waits": "is not healed yet",
        "slow": "is slower than its peers",
        "slow_over": "is as fast as its peers again",
        "kv_out_of_blocks": "is out of KV blocks",
        "kv_blocks_again": "has KV blocks again",
        "kv_thrash": "stopped swapping KV blocks, since they came and went",
        "kv_thrash_over": "swaps KV blocks again",
        "kv_limits_asked": "is asked for other limits of KV blocks",
        "kv_limits_set": "has other limits of KV blocks",
        "kv_limits_refused": "keeps its limits of KV blocks",
    },
    "deployment": {
        "scaled": "was scaled",
        "released": "has another release",
        "pool_opened": "may take whole cards while no slice is free",
        "pool_closed": "takes slices only again",
        "balancing": "has its sessions balanced",
        "balanced": "has its sessions balanced as far as is worth it",
        "delete": "is being deleted",
        "emptied": "is gone",
    },
    "model": {
        "storage_changed": "is stored elsewhere",
        "weights_claimed": "is wanted on nodes' disks",
        "weights_released": "is not wanted on nodes' disks any more",
        "weights_paused": "is fetched no further",
        "weights_resumed": "is fetched on",
        "compiled_registered": "has compiled files beside its weights",
        "compiled_removed": "has these compiled files no more",
        "prewarm_changed": "is fetched ahead by another policy",
        "prewarm_paused": "is fetched ahead no further",
        "prewarm_resumed": "is fetched ahead again",
        "prewarm_ended": "is not fetched ahead any more",
    },
    "model_import": {
        "import_asked": "was asked for",
        "import_began": "is being fetched",
        "import_held_up": "waits",
        "import_failed": "failed",
        "import_tried_again": "is tried again",
        "import_registered": "is registered",
        "import_cancelled": "was given up",
    },
    "rollout": {
        "created": "was asked for",
        "start": "began",
        "approve": "was approved, and began",
        "cancel": "was taken back",
        "pause": "was paused",
        "hold": "waits for approval of its next wave",
        "halt": "was halted",
        "resume": "goes on",
        "roll_back": "is being rolled back",
        "finish": "is done",
        "finish_back": "was rolled back",
        "abandon": "ended with its deployment",
        "wave_open": "opened a wave",
        "wave_reopen": "has others try a wave",
        "wave_begin": "moves a wave",
        "wave_soak": "watches a wave",
        "wave_pass": "passed a wave",
        "wave_fail": "failed in a wave",
        "wave_retry": "tries a wave again",
        "waves_added": "has more waves",
    },
    "validation": {
        "created": "was asked for",
        "start": "began",
        "check_failed": "has a failed check",
        "pass": "says go",
        "fail": "says no-go",
        "cancel": "was cancelled",
    },
    "installation": {
        "offered": "waits for its host key to be confirmed",
        "recognised": "has a known host key",
        "confirmed": "had its host key confirmed",
        "started": "started",
        "taken_over": "was taken over by another controller",
        "finished": "finished",
        "removed": "was removed",
        "broke": "failed",
        "asked": "was asked for again",
        "abandoned": "was abandoned",
        "heal_over_ssh_on": "may be healed over SSH",
        "heal_over_ssh_off": "may not be healed over SSH",
    },
    "session": {
        "move_asked": "is asked to be moved to another replica",
        "move_planned": "is to move to another replica",
        "move_send": "is being sent to another replica",
        "move_skip_sending": "moves without its KV",
        "move_arrived": "has arrived at another replica",
        "move_repinned": "moved to another replica",
        "move_drop": "stays where it was",
        "move_fail": "could not be sent to another replica",
    },
    "api_key": {
        "limits_changed": "has other limits",
    },
    "ssh_host_key": {
        "pinned": "was pinned",
        "forgotten": "was forgotten",
    },
    "staged_start": {
        "began": "began: not all that are to start can at once",
        "ended": "is over",
    },
    "controllers": {
        "leader_changed": "have another leader",
    },
    "incident": {
        "opened": "was opened",
        "resolve": "resolved itself",
        "confirm": "was confirmed",
        "dismiss": "was dismissed",
    },
}
_ACTORS: Mapping[str, str] = {"agent": "agent on {}", "controller": "{} controller", "user": "{}"}


def has_words(kind: str, event: str) -> bool:
    """Whether somebody chose words for the event of such a subject."""
    return event in _OF_KIND.get(kind, {}) or event in _OF_ANY


def words_of(kind: str, event: str, reason: str = "") -> str:
    """Say what happened to a subject, to be read after its name; an unknown event is spelled out."""
    words = _OF_KIND.get(kind, {}).get(event) or _OF_ANY.get(event) or event.replace("_", " ")
    how = _how_it_exited(reason) if event == "exited" else ""
    return f"{words}: {how}" if how else words


def actor_words(actor: str) -> str:
    """Name of who did it: `agent on node-1` for `agent:node-1`."""
    kind, colon, name = actor.partition(":")
    return _ACTORS.get(kind, "{}").format(name) if colon and name else actor


def _how_it_exited(reason: str) -> str:
    """`killed by signal 9` out of `attempt 2 killed by signal 9 after 3.1 s`."""
    start, _, rest = reason.partition(" ")
    number, _, sentence = rest.partition(" ")
    how, after, _ = sentence.partition(" after ")
    known = start == "attempt" and number.isdigit() and after and how != "ended"
    return how.removeprefix("exited with ") if known else ""
