"""Every rank gathers the same sequence, whatever it uses of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cai_zero.stage3.order import GatherOrder, complete


def test_passes_by_what_lies_before():
    order = GatherOrder("abcde")
    order.begin(backward=False)
    assert order.peek() == "a"
    assert order.use("a") == []
    assert order.peek() == "b"
    assert order.is_ahead("d") and not order.is_ahead("a")
    assert order.use("d") == ["b", "c"]
    assert order.is_ahead("e") and not order.is_ahead("d")
    assert order.peek() == "e"
    assert order.end() == ["e"]
    assert order.peek() is None
    assert order.end() == []


def test_what_is_not_ahead_changes_nothing():
    order = GatherOrder("abc")
    assert order.use("a") == [] and order.peek() is None  # outside a pass
    order.begin(backward=False)
    order.use("b")
    assert order.use("a") == order.use("b") == order.use("z") == []
    assert order.peek() == "c"
    assert order.end() == ["c"]


def test_a_pass_left_half_way_starts_anew():
    order = GatherOrder("abc")
    order.begin(backward=False)
    order.use("b")
    order.begin(backward=False)
    assert order.use("c") == ["a", "b"]
    assert order.peek() is None and order.end() == []


def test_backward_is_the_reverse_until_told():
    order = GatherOrder("abc")
    order.begin(backward=True)
    assert order.end() == ["c", "b", "a"]
    order = GatherOrder("abc", "acb")
    order.begin(backward=True)
    assert order.end() == ["a", "c", "b"]
    assert order.last == "c"


def test_a_learned_order_is_used_in_both_passes():
    order = GatherOrder("abc")
    order.learn("cabb", "bac")
    assert order.last == "b"
    order.begin(backward=False)
    assert order.use("b") == ["c", "a"]
    assert order.peek() == "b"  # it is used twice
    assert order.end() == ["b"]
    order.begin(backward=True)
    assert order.end() == ["b", "a", "c"]


def test_learning_keeps_what_was_not_seen():
    order = GatherOrder("abcd")
    order.learn("ca", "a")
    order.begin(backward=False)
    assert order.end() == ["c", "d", "a", "b"]
    order.begin(backward=True)
    assert order.end() == ["d", "c", "b", "a"]


def test_complete_puts_a_key_after_its_predecessor():
    assert complete("", "abc") == ("a", "b", "c")
    assert complete("cb", "abc") == ("a", "c", "b")
    assert complete("aca", "abc") == ("a", "b", "c", "a")
    assert complete("abc", "abc") == ("a", "b", "c")


keys = st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True)


@st.composite
def walks(draw):
    """(order, its two sequences, for several ranks and both passes which positions each uses)."""
    registered = draw(keys)
    order = GatherOrder(registered)
    forward, backward = list(registered), registered[::-1]
    if draw(st.booleans()):
        uses = st.lists(st.sampled_from(registered), max_size=14)  # some never, some twice
        recorded = draw(uses), draw(uses)
        order.learn(*recorded)
        forward, backward = (
            list(complete(seen, known)) for seen, known in zip(recorded, (forward, backward), strict=True)
        )
    ranks = draw(st.integers(2, 4))
    masks = [
        [
            draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s)))
            for s in (forward, backward, forward)
        ]
        for _ in range(ranks)
    ]
    return order, forward, backward, masks


def gathers(order: GatherOrder[int], used: list[int], *, backward: bool) -> list[int]:
    """What one rank gathers in a pass in which it uses `used`."""
    order.begin(backward=backward)
    found: list[int] = []
    for key in used:
        found += [*order.use(key), key]
    return found + order.end()


@settings(deadline=None)
@given(walks())
def test_all_ranks_gather_the_same(walk):
    order, forward, backward, masks = walk
    for rank in masks:
        for mask, sequence, back in zip(
            rank, (forward, backward, forward), (False, True, False), strict=True
        ):
            used = [key for key, wanted in zip(sequence, mask, strict=True) if wanted]
            assert gathers(order, used, backward=back) == sequence


@settings(deadline=None)
@given(walks())
def test_gathering_ahead_changes_nothing(walk):
    """A rank that gathers the next unit ahead, and then perhaps does not use it, gathers the same sequence."""
    order, forward, _, masks = walk
    for mask, _, _ in masks:
        order.begin(backward=False)
        found: list[int] = []
        ahead: list[int] = []
        for key, wanted in zip(forward, mask, strict=True):
            if not wanted:
                continue
            if key in ahead:
                del ahead[: ahead.index(key) + 1]
            else:
                found += [*order.use(key), key]
                ahead.clear()
            following = order.peek()
            if not ahead and following is not None:
                assert order.use(following) == []
                ahead.append(following)
                found.append(following)
        assert found + order.end() == forward


@settings(deadline=None)
@given(keys, st.data())
def test_complete_keeps_the_order_and_adds_each_missing_key_once(registered, data):
    recorded = data.draw(st.lists(st.sampled_from(registered), max_size=14))
    whole = complete(recorded, registered)
    assert [k for k in whole if k in recorded] == recorded
    assert set(whole) == set(registered)
    assert len(whole) == len(recorded) + len(set(registered) - set(recorded))
    for i, key in enumerate(registered):
        if key not in recorded:
            at = whole.index(key)
            assert at == 0 if i == 0 else registered[i - 1] in whole[:at]
