"""How many replicas a load needs, how many of them a node carries, and so how many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from exaserve_ops.lib.units import size_text
from exaserve_ops.serving.domain.engine_claims import torch_budget
from exaserve_ops.serving.domain.engine_launch import SHARE_OPTION, TORCH, EngineLaunch
from exaserve_ops.serving.domain.memory_fixes import Attempt, Fix, fixes
from exaserve_ops.serving.domain.memory_plan import (
    NOT,
    AcceleratorMemory,
    MemoryPlan,
    ModelFigures,
    PlanUnknown,
    SequenceMix,
    plan_memory,
)
from exaserve_ops.serving.domain.reservation import margin_bytes

MEASURED, STATED, UNKNOWN = "measured", "stated", "unknown"
MEMORY, RATE, ASKED = "memory", "rate", "as asked"


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask of one model."""

    prompt_tokens: int
    """Mean of a request."""
    output_tokens: int
    limit_tokens: int
    """Prompt and answer of the longest request."""
    requests_per_second: float | None = None
    concurrency: int | None = None
    """Requests that run at once, where that is what is known."""
    sessions: int | None = None
    """Conversations whose keys and values shall stay, running or not."""
    replicas: int | None = None
    """As many as are asked for, whatever the load."""

    @property
    def mean_tokens(self) -> int:
        """Of a sequence at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one replica is; each figure with where it is from."""

    seconds_per_request: float | None = None
    """How long a request runs, on average."""
    seconds_source: str = UNKNOWN
    tokens_per_second: float | None = None
    """Most output tokens of one replica, all sequences together."""
    tokens_source: str = UNKNOWN


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of one kind."""

    accelerator: AcceleratorMemory
    accelerators: int
    spare_ratio: float = 0.0
    """Part of the nodes that stands by for failures, maintenance and roll-outs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One model, how it runs, and its load."""

    model: ModelFigures
    launch: EngineLaunch
    load: Load
    rates: Rates = Rates()
    sequences: int | None = None
    """Held by each replica at once; `None`: as many as the memory of its accelerators holds."""
    budget_bytes: int | None = None
    """Set aside for each replica on each accelerator, if the deployment says so."""


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """The answer for one model."""

    name: str
    memory: MemoryPlan
    ways: int
    """Accelerators of one replica."""
    per_group: int
    """Replicas on one group of accelerators, with weights shared where that applies."""
    per_group_unshared: int
    per_group_shared: int
    """The same if each has weights of its own, and if all share them."""
    shares_weights: bool
    bytes_each: int
    """What one replica takes of each of its accelerators, weights included."""
    sequences_each: int
    """Held by one replica, of mean length."""
    concurrency: float | None
    """Requests at once by Little's law, or as stated; `None`: not known."""
    replicas_for_memory: int | None
    replicas_for_rate: int | None
    replicas: int
    decided_by: str
    share_hint: tuple[str, str] | None
    """Option to set so that as many as that start beside one another."""
    fixes: tuple[Fix, ...]
    """What would make a tight plan fit."""
    assumptions: tuple[str, ...]

    @property
    def groups(self) -> int:
        """Groups of accelerators that hold all replicas."""
        return ceil(self.replicas / self.per_group) if self.per_group else 0


@dataclass(frozen=True, slots=True)
class WorkloadRefusal:
    """Why one model cannot be planned."""

    name: str
    reason: str
    memory: MemoryPlan | None = None
    fixes: tuple[Fix, ...] = ()
    """What would make it fit."""
    upper_bound_bytes_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The answer for all models together."""

    workloads: tuple[WorkloadPlan, ...]
    refusals: tuple[WorkloadRefusal, ...]
    nodes_for_load: int
    nodes_spare: int
    assumptions: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """All nodes, spare ones included."""
        return self.nodes_for_load + self.nodes_spare

    @property
    def replicas(self) -> int:
        """Replicas of all models."""
        return sum(plan.replicas for plan in self.workloads)


def plan_fleet(workloads: Sequence[Workload], kind: NodeKind) -> FleetPlan:
    """Plan all models on nodes of one kind. A model that cannot be planned is told, and not counted."""
    answers = [plan_workload(workload, kind) for workload in workloads]
    plans = tuple(answer for answer in answers if isinstance(answer, WorkloadPlan))
    refusals = tuple(answer for answer in answers if isinstance(answer, WorkloadRefusal))
    needed = _pack([(plan.ways, plan.groups) for plan in plans], kind.accelerators)
    whole = ceil(needed / (1 - kind.spare_ratio)) if needed else 0
    assumptions = [
        f"{size_text(margin_bytes(kind.accelerator.total_bytes))} of each accelerator are never planned with",
        "all nodes are alike, and replicas never share a group of accelerators with another model's",
    ]
    if kind.spare_ratio:
        assumptions.append(f"{kind.spare_ratio:.0%} of all nodes stand by, and carry no load")
    return FleetPlan(plans, refusals, needed, whole - needed, tuple(assumptions))


def plan_workload(workload: Workload, kind: NodeKind) -> WorkloadPlan | WorkloadRefusal:
    """Plan one model: replicas on a group of accelerators from memory, then replicas from the load."""
    name, load = workload.model.name, workload.load
    mix = SequenceMix(mean_tokens=load.mean_tokens, sequences=workload.sequences or 1)
    launch = _with_limit(workload.launch, load)
    memory = plan_memory(workload.model, launch, kind.accelerator, mix, budget_bytes=workload.budget_bytes)
    if isinstance(memory, PlanUnknown):
        return WorkloadRefusal(
            name, memory.reason, upper_bound_bytes_per_token=memory.upper_bound_bytes_per_token
        )
    if load.limit_tokens > memory.limit_tokens:
        text = (
            f"requests of {load.limit_tokens:,} tokens are longer than the {memory.limit_tokens:,} it serves"
        )
        return WorkloadRefusal(name, text, memory)
    ways = launch.ways
    if ways > kind.accelerators and ways % kind.accelerators:
        text = f"{ways} accelerators do not come out as whole nodes of {kind.accelerators}"
        return WorkloadRefusal(name, text, memory)
    answer = _counted(workload, launch, kind, memory)
    attempt = Attempt(workload.model, launch, kind.accelerator, mix, workload.budget_bytes, kind.accelerators)
    return replace(answer, fixes=fixes(attempt, memory))


def _with_limit(launch: EngineLaunch, load: Load) -> EngineLaunch:
    """Serve what the load needs, where the launch does not say how long a sequence may be."""
    if launch.length_tokens is not None or not load.limit_tokens:
        return launch
    return replace(launch, length_tokens=load.limit_tokens)


def _counted(
    workload: Workload, launch: EngineLaunch, kind: NodeKind, memory: MemoryPlan
) -> WorkloadPlan | WorkloadRefusal:
    shares = launch.shares_weights and kind.accelerator.shares_weights
    each, sequences = _one_replica(workload, launch, memory)
    unshared = _carried(kind.accelerator, each, memory.weights_bytes, shared=False)
    shared = _carried(kind.accelerator, each, memory.weights_bytes, shared=True)
    per_group = shared if shares else unshared
    if memory.problems:
        return WorkloadRefusal(workload.model.name, memory.problems[0], memory)
    if per_group < 1 or sequences < 1 or memory.verdict == NOT:
        return WorkloadRefusal(workload.model.name, memory.why, memory)
    if workload.sequences is None and workload.budget_bytes is None and launch.share_ratio is None:
        # Nothing says how little a replica may take: each has its accelerators to itself.
        per_group = unshared = shared = 1
    per_group, memory, hint = _beside_one_another(
        replace(workload, launch=launch), kind, memory, most=per_group, each_bytes=each
    )
    concurrency, told = _concurrency(workload)
    by_memory = ceil(concurrency / sequences) if concurrency is not None else None
    by_rate = _by_rate(workload)
    replicas, decided = _decide(workload.load, by_memory, by_rate)
    return WorkloadPlan(
        name=workload.model.name,
        memory=memory,
        ways=launch.ways,
        per_group=per_group,
        per_group_unshared=unshared,
        per_group_shared=shared if launch.shares_weights else unshared,
        shares_weights=shares,
        bytes_each=each,
        sequences_each=sequences,
        concurrency=concurrency,
        replicas_for_memory=by_memory,
        replicas_for_rate=by_rate,
        replicas=replicas,
        decided_by=decided,
        share_hint=hint,
        fixes=(),
        assumptions=(*told, *_told_rates(workload.rates), *memory.assumptions),
    )


def _beside_one_another(
    workload: Workload, kind: NodeKind, memory: MemoryPlan, *, most: int, each_bytes: int
) -> tuple[int, MemoryPlan, tuple[str, str] | None]:
    """As many replicas as start beside one another, the plan of one, and what to set for it."""
    launch = workload.launch
    if launch.engine == TORCH and workload.sequences and workload.budget_bytes is None:
        mix = SequenceMix(workload.load.mean_tokens, workload.sequences)
        plan = plan_memory(workload.model, launch, kind.accelerator, mix, budget_bytes=each_bytes)
        told = plan if isinstance(plan, MemoryPlan) else memory
        return most, told, ("replica_memory_bytes", str(each_bytes))
    for count in range(most, 1, -1):
        hint = _share_hint(launch, count, kind.accelerator.total_bytes)
        if hint is None:
            return most, memory, None
        mix = SequenceMix(workload.load.mean_tokens, workload.sequences or 1)
        shared = plan_memory(
            workload.model, replace(launch, share_ratio=float(hint[1])), kind.accelerator, mix
        )
        if isinstance(shared, MemoryPlan) and shared.verdict != NOT:
            return count, shared, hint
    return min(most, 1), memory, None


def _one_replica(workload: Workload, launch: EngineLaunch, memory: MemoryPlan) -> tuple[int, int]:
    """What one replica takes of an accelerator, and how many mean sequences it then holds.

    As set aside; by its share; as many sequences as are asked for; or all that one accelerator holds.
    """
    told = workload.budget_bytes is not None or launch.share_ratio is not None
    if told or workload.sequences is None:
        return memory.claim.bytes, memory.sequences_at_mean
    if launch.engine == TORCH:
        # Of a small model a fifth of its budget is less than a context takes.
        budget = torch_budget(memory.weights_bytes, memory.wanted_kv_bytes)
        return max(budget, memory.wanted_bytes), workload.sequences
    return memory.wanted_bytes, workload.sequences


def _carried(room: AcceleratorMemory, each_bytes: int, weights_bytes: int, *, shared: bool) -> int:
    """Replicas that one accelerator carries; with one copy of the weights for all of them, if shared."""
    left = room.total_bytes - margin_bytes(room.total_bytes) - room.held_bytes
    if not shared:
        return max(0, floor(left / each_bytes)) if each_bytes else 0
    own = max(1, each_bytes - weights_bytes)
    return max(0, (left - weights_bytes) // own)


def _concurrency(workload: Workload) -> tuple[float | None, tuple[str, ...]]:
    """Sequences to hold at once: by Little's law where the rate is known, at least what is stated."""
    load, rates = workload.load, workload.rates
    known: list[tuple[float, str]] = []
    if load.concurrency is not None:
        known.append((float(load.concurrency), f"{load.concurrency:,} requests at once, as stated"))
    if load.sessions is not None:
        known.append((float(load.sessions), f"{load.sessions:,} conversations keep their KV, as stated"))
    if load.requests_per_second is not None and rates.seconds_per_request is not None:
        count = load.requests_per_second * rates.seconds_per_request
        product = f"{load.requests_per_second:g} requests a second x {rates.seconds_per_request:g} s each"
        known.append((count, f"{product} = {count:,.1f} at once (Little's law)"))
    if not known:
        return None, (
            "how many requests run at once is not known: say how long one takes, or how many there are",
        )
    count, text = max(known)
    return count, (text,)


def _by_rate(workload: Workload) -> int | None:
    """Replicas so that tokens come as fast as they are asked for; `None` where the rate is not known."""
    load, rates = workload.load, workload.rates
    if load.requests_per_second is None or not rates.tokens_per_second:
        return None
    return max(1, ceil(load.requests_per_second * load.output_tokens / rates.tokens_per_second))


def _decide(load: Load, by_memory: int | None, by_rate: int | None) -> tuple[int, str]:
    if load.replicas is not None:
        return load.replicas, ASKED
    if by_rate is not None and by_rate > (by_memory or 0):
        return by_rate, RATE
    return max(1, by_memory or 1), MEMORY


def _told_rates(rates: Rates) -> tuple[str, ...]:
    told = []
    if rates.seconds_per_request is not None:
        told.append(f"a request takes {rates.seconds_per_request:g} s ({rates.seconds_source})")
    if rates.tokens_per_second is not None:
        told.append(f"a replica makes {rates.tokens_per_second:g} tokens a second ({rates.tokens_source})")
    else:
        told.append("how many tokens a second a replica makes is not known: memory alone decides")
    return tuple(told)


def _share_hint(launch: EngineLaunch, per_group: int, total_bytes: int) -> tuple[str, str] | None:
    """Share of the card for each of several replicas, rounded down so that they fit together."""
    option = SHARE_OPTION.get(launch.engine)
    if option is None or per_group <= 1 or launch.share_ratio is not None:
        return None
    usable = 1 - margin_bytes(total_bytes) / total_bytes
    return option, f"{floor(usable / per_group * 100) / 100:g}"


def _pack(groups: Sequence[tuple[int, int]], accelerators: int) -> int:
    """Nodes for groups of accelerators, largest first; what is left of a node takes smaller groups."""
    free: dict[int, int] = {}
    """Nodes with so many accelerators left."""
    nodes = 0
    for ways, wanted in sorted(groups, reverse=True):
        if ways >= accelerators:
            nodes += wanted * ceil(ways / accelerators)
            continue
        count = wanted
        for left in sorted(size for size in free if size >= ways):
            taken = min(count, free[left] * (left // ways))
            count -= taken
            _use(free, left, ways, taken)
        opened = ceil(count / (accelerators // ways))
        nodes += opened
        free[accelerators] = free.get(accelerators, 0) + opened
        _use(free, accelerators, ways, count)
    return nodes


def _use(free: dict[int, int], left: int, ways: int, count: int) -> None:
    """Put `count` groups of `ways` on nodes with `left` accelerators free, filling one after the other."""
    each = left // ways
    full, rest = divmod(count, each)
    for groups, nodes in ((each, full), (rest, 1 if rest else 0)):
        if nodes:
            free[left] -= nodes
            remaining = left - groups * ways
            free[remaining] = free.get(remaining, 0) + nodes
    if not free.get(left):
        free.pop(left, None)
