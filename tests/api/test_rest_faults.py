"""What fails by a fault of ours is told in the shape that the caller reads, and without its details."""

from __future__ import annotations

import pytest
from django.conf import LazySettings
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from exaserve_ops.urls import handler500 as handler500  # noqa: PLC0414 - Django looks for it in this module

SECRET = "password=hunter2"


class FailingView(APIView):
    """Fails as no view should."""

    authentication_classes = ()
    permission_classes = (AllowAny,)

    def get(self, request: Request) -> Response:  # noqa: ARG002 - of every view
        raise RuntimeError(SECRET)


@login_not_required
def failing_page(request: HttpRequest) -> HttpResponse:  # noqa: ARG001 - of every view
    raise RuntimeError(SECRET)


urlpatterns = [path("api/v1/failing", FailingView.as_view()), path("failing", failing_page)]


@pytest.fixture
def client_of_failing_views(settings: LazySettings) -> Client:
    settings.ROOT_URLCONF = __name__
    return Client(raise_request_exception=False)


@pytest.mark.django_db
def test_fault_under_rest_is_json_and_elsewhere_a_page_and_neither_tells_details(
    client_of_failing_views: Client,
) -> None:
    answer = client_of_failing_views.get("/api/v1/failing")
    assert (answer.status_code, answer["Content-Type"]) == (500, "application/json")
    assert answer.json()["error"]["code"] == "internal"
    page = client_of_failing_views.get("/failing")
    assert (page.status_code, page["Content-Type"]) == (500, "text/html; charset=utf-8")
    assert b"This page failed" in page.content
    for told in (answer.content, page.content):
        assert SECRET.encode() not in told
        assert b"RuntimeError" not in told
