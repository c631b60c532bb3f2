"""Weights of models on nodes' disks: who has them, who is to have them, when they are fetched ahead."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from exaserve_ops.api.idempotency import acts_once
from exaserve_ops.api.ports import replica_loads
from exaserve_ops.api.serializers.strict import NoBodySerializer
from exaserve_ops.api.serializers.weights import (
    ModelWeightsSerializer,
    PrewarmPauseSerializer,
    PrewarmRequestSerializer,
    StorageRequestSerializer,
    WeightsRequestSerializer,
)
from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.weights import ModelWeights, model_weights
from exaserve_ops.serving.services.weights import (
    change_storage,
    end_prewarm,
    pause_prewarm,
    pause_weights,
    release_weights,
    set_prewarm,
    want_weights,
)
from exaserve_ops.weights.domain.prewarm import PrewarmRules
from exaserve_ops.weights.domain.wanted import PERSON, Origin


class ModelWeightsViewSet(OpsViewSet[Model]):
    """One model's weights on the nodes."""

    queryset = Model.objects.all()
    serializer_class = ModelWeightsSerializer
    permission_by_action: ClassVar[dict[str, str]] = {
        "retrieve": "weights.view_nodeweights",
        "act": "weights.add_weightsclaim",
        "prewarm": "weights.change_prewarmpolicy",
        "pause_prewarm": "weights.change_prewarmpolicy",
        "end_prewarm": "weights.change_prewarmpolicy",
        "store": "serving.change_model",
    }

    @extend_schema(responses=ModelWeightsSerializer)
    def retrieve(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say how a model's weights stand on every node in service, how fast they come and from where."""
        return self._answer(self.get_object())

    @extend_schema(request=WeightsRequestSerializer, responses=ModelWeightsSerializer)
    @acts_once
    def act(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Have a model on nodes' disks by hand, take that back, pause it or let it go on.

        What a prewarm policy, a rollout or a replica wants there is not touched.
        """
        body = self.read_body(WeightsRequestSerializer)
        model, now, reason = self.get_object(), clock.now(), body["reason"]
        match body["action"]:
            case "want":
                want_weights(
                    model.pk,
                    body["nodes"],
                    owner=PERSON,
                    actor=self.actor,
                    now=now,
                    reason=reason,
                    bytes_per_second=body["bytes_per_second"],
                )
            case "release":
                release_weights(
                    model.pk, owner=PERSON, actor=self.actor, now=now, node_ids=body["nodes"], reason=reason
                )
            case act:
                pause_weights(
                    model.pk,
                    owner=PERSON,
                    paused=act == "pause",
                    actor=self.actor,
                    now=now,
                    node_ids=body["nodes"],
                    reason=reason,
                )
        return self._answer(model)

    @extend_schema(request=PrewarmRequestSerializer, responses=ModelWeightsSerializer)
    @acts_once
    def prewarm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Fetch a model ahead of being needed, by these rules from now on."""
        body = self.read_body(PrewarmRequestSerializer)
        reason, names = body.pop("reason"), tuple(body.pop("nodes"))
        model = self.get_object()
        rules = PrewarmRules(model.digest, node_names=names, **body)
        set_prewarm(model.pk, rules, actor=self.actor, now=clock.now(), reason=reason)
        return self._answer(model)

    @extend_schema(request=PrewarmPauseSerializer, responses=ModelWeightsSerializer)
    @acts_once
    def pause_prewarm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Stop fetching it ahead and keep what is there, or go on. Refused (409) where it has no rules."""
        body = self.read_body(PrewarmPauseSerializer)
        model = self.get_object()
        pause_prewarm(
            model.pk, paused=body["paused"], actor=self.actor, now=clock.now(), reason=body["reason"]
        )
        return self._answer(model)

    @extend_schema(request=NoBodySerializer, responses=ModelWeightsSerializer)
    def end_prewarm(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Fetch it ahead no more; what is on disks stays while there is room."""
        model = self.get_object()
        end_prewarm(model.pk, actor=self.actor, now=clock.now())
        return self._answer(model)

    @extend_schema(request=StorageRequestSerializer, responses=ModelWeightsSerializer)
    @acts_once
    def store(self, request: Request, pk: UUID) -> Response:  # noqa: ARG002 - DRF's signature
        """Say what replicas start from, and where nodes fetch it. Refused (409) while replicas of it live."""
        body = self.read_body(StorageRequestSerializer)
        origins = [Origin(**place) for place in body["origins"]] if "origins" in body else None
        model = change_storage(
            self.get_object().pk,
            storage=body["storage"],
            origins=origins,
            actor=self.actor,
            now=clock.now(),
            reason=body["reason"],
        )
        return self._answer(model)

    def _answer(self, model: Model) -> Response:
        found: ModelWeights = model_weights(model, replica_loads().read_nodes)
        return Response(ModelWeightsSerializer(found).data)
