"""Where agents join. Public: the token in the body is the credential."""

from __future__ import annotations

import logging
import math
from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from exaserve_ops.api.errors import refusal
from exaserve_ops.api.parsers import BoundedJSONParser
from exaserve_ops.api.ports import store_users
from exaserve_ops.api.serializers.inventory import JoinAnswerSerializer, JoinRequestSerializer
from exaserve_ops.api.views.base import without_store
from exaserve_ops.inventory.domain.addresses import address_problem
from exaserve_ops.inventory.domain.store_users import StoreAwayError, StoreUsersRefusedError
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services.joining import JoinWish, enrol
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import DeniedError, InvalidInputError
from exaserve_ops.lib.refusals import RefusalBound
from workers.protocol import store_user
from workers.protocol.addresses import is_loopback
from workers.protocol.digests import node_key

REFUSALS = RefusalBound()
AWAY_SECONDS = 2

logger = logging.getLogger(__name__)


class JoinView(APIView):
    """Takes nodes in, as many as a token admits."""

    authentication_classes = ()
    permission_classes = [AllowAny]
    parser_classes = [BoundedJSONParser]
    http_method_names = ["post"]

    @extend_schema(request=JoinRequestSerializer, responses={201: JoinAnswerSerializer}, auth=[])
    def post(self, request: Request) -> Response:
        """Spend one use of a token; the answer holds the node's key, this once."""
        address = request.META.get("REMOTE_ADDR", "")
        wait_seconds = REFUSALS.wait_seconds(address)
        if wait_seconds > 0:
            return _later(wait_seconds)
        body = JoinRequestSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        try:
            node = _enrol(body.validated_data, peer=address)
        except DeniedError as error:
            REFUSALS.count_refusal(address)
            return refusal(status.HTTP_401_UNAUTHORIZED, "denied", str(error))
        try:
            return without_store(Response(_answer(node), status=status.HTTP_201_CREATED))
        except (StoreAwayError, StoreUsersRefusedError) as error:
            # The node may ask again with the same token: it has not reported yet.
            return _without_user(node, error)


def _enrol(wish: dict[str, Any], *, peer: str) -> Node:
    if wish["address"]:
        # From elsewhere a local address means another machine than it does here, whatever is allowed.
        here = settings.ENV.allow_local_addresses and is_loopback(peer)
        problem = address_problem(wish["address"], allow_local=here)
        if problem:
            raise InvalidInputError("address", problem)
    asked = JoinWish(
        node_id=wish["node_id"],
        name=wish["name"],
        hostname=wish["hostname"],
        name_suffix=wish["name_suffix"],
        address=wish["address"],
    )
    return enrol(asked, token_text=wish["token"], now=clock.now())


def _answer(node: Node) -> dict[str, Any]:
    key = node_key(settings.ENV.fleet_secret, str(node.pk), node.key_epoch)
    return {
        "node_id": str(node.pk),
        "name": node.name,
        "node_key": key.hex(),
        "key_epoch": node.key_epoch,
        "redis_url": _redis_url(str(node.pk), key),
    }


def _redis_url(node_id: str, key: bytes) -> str:
    url = settings.ENV.agent_redis_url
    if not settings.ENV.redis_node_users:
        return str(url)
    # Before the answer, or the agent would begin with refusals; the controllers keep it from then on.
    store_users().admit(node_id, key)
    return store_user.url_for(url, node_id, key)


def _without_user(node: Node, error: StoreAwayError | StoreUsersRefusedError) -> Response:
    logger.error("event=join_without_user node=%s detail=%s", node.pk, error)
    response = refusal(status.HTTP_503_SERVICE_UNAVAILABLE, "unavailable", str(error))
    response["Retry-After"] = str(AWAY_SECONDS)
    return response


def _later(wait_seconds: float) -> Response:
    message = "Too many refused attempts from this address; try again later."
    response = refusal(status.HTTP_429_TOO_MANY_REQUESTS, "throttled", message)
    response["Retry-After"] = str(math.ceil(wait_seconds))
    return response
