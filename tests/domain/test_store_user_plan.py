"""Which users of nodes are made, cut off and dropped in Redis."""

from __future__ import annotations

from exaserve_ops.inventory.domain.store_users import UserPlan, plan_users


def test_nothing_is_done_where_all_is_as_it_should_be() -> None:
    standing = {"a": "1", "b": "2"}
    assert not plan_users(standing, standing, standing)


def test_empty_redis_gets_everybody_and_nobody_is_cut_off() -> None:
    wanted = {"a": "1", "b": "2"}
    assert plan_users(wanted, {}, {}) == UserPlan(wanted, frozenset(), frozenset())


def test_user_of_an_earlier_process_is_written_again_without_being_cut_off() -> None:
    assert plan_users({"a": "1"}, {"a": "1"}, {}) == UserPlan({"a": "1"}, frozenset(), frozenset())


def test_raised_epoch_cuts_the_node_off_even_if_another_process_knew_it() -> None:
    for ours in ({"a": "1"}, {}):
        plan = plan_users({"a": "2"}, {"a": "1"}, ours)
        assert plan == UserPlan({"a": "2"}, frozenset({"a"}), frozenset())


def test_user_with_no_password_or_several_is_set_right_and_cut_off() -> None:
    assert plan_users({"a": "1"}, {"a": ""}, {}).cut == {"a"}


def test_nodes_that_are_gone_lose_their_users() -> None:
    plan = plan_users({"a": "1"}, {"a": "1", "gone": "9"}, {"a": "1", "gone": "9"})
    assert plan == UserPlan({}, frozenset(), frozenset({"gone"}))
    assert plan
