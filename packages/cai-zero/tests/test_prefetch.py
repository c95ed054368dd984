"""The order of uses, recorded and predicted."""

from __future__ import annotations

from cai_zero.prefetch import UseOrder


def uses(order, keys):
    order.start()
    return [order.use(k) for k in keys]


def test_the_second_step_is_predicted():
    order = UseOrder()
    assert uses(order, "abcba") == [None] * 5
    assert uses(order, "abcba") == ["b", "c", "b", "a", None]


def test_repeated_uses_are_told_apart_by_position():
    order = UseOrder()
    uses(order, "abab")
    assert uses(order, "abab") == ["b", "a", "b", None]


def test_a_changed_order_is_not_predicted_until_recorded():
    order = UseOrder()
    uses(order, "abc")
    assert uses(order, "acb") == ["b", None, None]
    assert uses(order, "acb") == ["c", "b", None]
    assert uses(order, "acbd") == ["c", "b", None, None]


def test_the_first_use_begins_a_step():
    order = UseOrder()
    assert order.is_first("a")
    order.start()
    order.use("a")
    assert order.is_first("a")
    assert not order.is_first("b")


def test_an_empty_step_keeps_the_recorded_one():
    order = UseOrder()
    uses(order, "ab")
    order.start()
    order.start()
    assert order.use("a") == "b"
