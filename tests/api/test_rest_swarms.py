"""How weights go from node to node, as REST tells it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exaserve_ops.weights.domain.held import HeldWeights, PullSight, StoreSight, SwarmSight
from tests.api.conftest import Telemetry
from tests.fakes.world import JsonClient, make_model, make_node

pytestmark = pytest.mark.django_db


def test_a_models_swarm_tells_who_has_what_from_whom_and_what_the_origin_gave(
    as_role: Callable[[str], JsonClient], telemetry: Telemetry
) -> None:
    model = make_model()
    total = sum(file.size_bytes for file in model.files.all())
    first, second, stranger = (make_node(name) for name in ("n1", "n2", "n3"))
    pull = PullSight(0, str(first.pk), "flowing", 3e6, 0.1, 4.0, "network")
    whole = HeldWeights(
        model.digest,
        "ready",
        total,
        total,
        wanted=True,
        sources=(("folder", "mount", total),),
        swarm=SwarmSight(streams=((str(second.pk), 3e6),)),
    )
    coming = HeldWeights(
        model.digest,
        "fetching",
        total,
        total // 2,
        bytes_per_second=3e6,
        wanted=True,
        sources=(("peer", str(first.pk), total // 2),),
        swarm=SwarmSight(pulls=(pull,)),
    )
    telemetry.weights = {
        str(first.pk): StoreSight(1, held=(whole,)),
        str(second.pk): StoreSight(1, held=(coming,)),
        str(stranger.pk): StoreSight(1, held=(HeldWeights("sha256:other", "ready", 1, 1, wanted=True),)),
    }
    told = as_role("viewer").get(f"/api/v1/models/{model.pk}/swarm").json()
    members = {member["node_id"]: member for member in told["members"]}
    assert set(members) == {str(first.pk), str(second.pk)}
    assert (told["nodes"], told["whole_nodes"], told["origin_copies"]) == (2, 1, 1.0)
    assert told["peer_bytes"] == total // 2
    assert members[str(first.pk)]["gives_bytes_per_second"] == 3e6
    stripe = members[str(second.pk)]["stripes"][0]
    assert (stripe["parent_node"], stripe["bottleneck"], stripe["stage"]) == (
        str(first.pk),
        "network",
        "flowing",
    )


def test_a_model_that_nobody_fetches_has_an_empty_swarm(as_role: Callable[[str], JsonClient]) -> None:
    model = make_model()
    told = as_role("viewer").get(f"/api/v1/models/{model.pk}/swarm").json()
    assert (told["nodes"], told["members"], told["origin_copies"]) == (0, [], 0.0)


def test_a_misspelt_parameter_is_refused(as_role: Callable[[str], JsonClient]) -> None:
    model = make_model()
    assert as_role("viewer").get(f"/api/v1/models/{model.pk}/swarm?nod=1").status_code == 400
