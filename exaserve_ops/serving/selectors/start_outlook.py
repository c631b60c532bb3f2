"""How the starts of this moment go: who starts, who waits for what, in which waves, and for how long yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, Q, QuerySet

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.starts import StartLimits, cause_of
from exaserve_ops.serving.models import Replica, StagedStart
from exaserve_ops.serving.selectors.members import WAITS_TO_START
from exaserve_ops.serving.selectors.starts import start_limits

MEASURED_OVER = timedelta(minutes=1)
LEAST_MEASURED = 5
"""Replicas that must have become ready in that time: of fewer, no pace is told."""
_STARTS = Q(status__in=(states.STARTING, states.LOADING)) | (
    Q(status=states.PLACED, start_waits_since__isnull=True)
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that replicas wait for."""

    words: str
    replicas: int
    example: str
    """What is told of one of them."""


@dataclass(frozen=True, slots=True)
class StartWave:
    """Replicas that were let go in the same moment."""

    at: datetime
    let_go: int
    ready: int


@dataclass(frozen=True, slots=True)
class StartOutlook:
    """Starts of the fleet, or of one deployment, as recorded."""

    starting: int
    waiting: int
    ready: int
    """Of those that were let go since the staged start began; 0 where there is none."""
    since: datetime | None
    """When the staged start began; `None`: nobody has to wait."""
    causes: tuple[Cause, ...]
    waves: tuple[StartWave, ...]
    ready_per_second: float | None
    """Over the last minute; `None`: too few became ready to tell."""
    eta_seconds: float | None
    """Until all are ready, at that pace."""
    limits: StartLimits
    simulated: int = 0
    """Of those that start or wait, the ones on simulated nodes."""

    @property
    def is_staged(self) -> bool:
        """Whether somebody had to wait, and not all who did are ready."""
        return self.since is not None


def has_staged_start() -> bool:
    """Whether somebody has to wait for a turn, or had to and not all are ready."""
    return StagedStart.objects.filter(ended_at=None).exists()


def start_outlook(*, now: datetime, deployment_id: UUID | None = None) -> StartOutlook:
    """Read how starts go, in the fleet or of one deployment: eight queries, three while it is quiet."""
    staged = StagedStart.objects.filter(ended_at=None).first()
    rows = Replica.objects.filter(wanted=Replica.Wanted.RUN).exclude(status=states.STOPPED)
    if deployment_id is not None:
        rows = rows.filter(deployment=deployment_id)
    counts = rows.order_by().aggregate(
        starting=Count("pk", filter=_STARTS),
        waiting=Count("pk", filter=WAITS_TO_START),
        simulated=Count("pk", filter=(_STARTS | WAITS_TO_START) & Q(node__simulated=True)),
    )
    if staged is None:
        return _quiet(**counts)
    let_go = rows.filter(start_allowed_at__gte=staged.began_at)
    waves = _waves(let_go)
    left = counts["starting"] + counts["waiting"]
    pace = _pace(let_go, staged.began_at, now)
    part = left or waves
    return StartOutlook(
        starting=counts["starting"],
        waiting=counts["waiting"],
        ready=sum(wave.ready for wave in waves),
        since=staged.began_at if part else None,
        causes=_causes(rows),
        waves=waves,
        ready_per_second=pace,
        eta_seconds=left / pace if pace and left else None,
        limits=start_limits(),
        simulated=counts["simulated"],
    )


def _quiet(*, starting: int, waiting: int, simulated: int) -> StartOutlook:
    return StartOutlook(starting, waiting, 0, None, (), (), None, None, start_limits(), simulated)


def _waves(let_go: QuerySet[Replica]) -> tuple[StartWave, ...]:
    ready = Count("pk", filter=Q(status=states.READY))
    rows = let_go.order_by("start_allowed_at").values_list("start_allowed_at")
    return tuple(StartWave(at, count, done) for at, count, done in rows.annotate(Count("pk"), ready=ready))


def _pace(let_go: QuerySet[Replica], began_at: datetime, now: datetime) -> float | None:
    """Replicas that became ready a second, of late."""
    since = max(began_at, now - MEASURED_OVER)
    count = let_go.filter(status=states.READY, ready_at__gte=since).count()
    seconds = (now - since).total_seconds()
    return count / seconds if count >= LEAST_MEASURED and seconds > 0 else None


def _causes(rows: QuerySet[Replica]) -> tuple[Cause, ...]:
    told = rows.filter(WAITS_TO_START).order_by().values_list("reason").annotate(Count("pk"))
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, count in told:
        cause = cause_of(reason)
        counts[cause] += count
        examples[cause] = min(examples.get(cause, reason), reason)
    return tuple(Cause(words, count, examples[words]) for words, count in counts.most_common())
