"""`manage.py create_api_key` prints one working key, or says what is wrong."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from exaserve_ops.access.models import ApiKey, Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.lib import clock
from tests.fakes.world import make_user

pytestmark = pytest.mark.django_db


def test_prints_the_key_and_nothing_else() -> None:
    user, out = make_user("ci", "operator"), StringIO()
    call_command("create_api_key", user="ci", name="pipeline", scope=["api", "inference"], days=2, stdout=out)
    [text] = out.getvalue().split()
    for scope in Scope:
        key = find_valid_key(text, scope, now=clock.now())
        assert key is not None
        assert key.user == user
    made = ApiKey.objects.get()
    assert made.expires_at is not None
    assert round((made.expires_at - made.created_at).total_seconds()) == 2 * 24 * 3600


@pytest.mark.parametrize(
    ("options", "message"),
    [({"user": "nobody"}, "no user"), ({"name": " "}, "name"), ({"days": 0}, "--days")],
)
def test_says_what_is_wrong(options: dict[str, object], message: str) -> None:
    make_user("ci", "operator")
    with pytest.raises(CommandError, match=message):
        call_command("create_api_key", **({"user": "ci", "name": "x"} | options))
    assert not ApiKey.objects.exists()
