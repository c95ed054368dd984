from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cai_apps.data.shuffle import permute


@given(st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(size))


@given(st.integers(1, 500), st.integers(0, 100))
def test_is_a_function_of_the_position_alone(size, seed):
    whole = permute(np.arange(size), size, seed=seed, epoch=3)
    part = permute(np.arange(size)[::2], size, seed=seed, epoch=3)
    assert (whole[::2] == part).all()


def test_seeds_and_epochs_have_different_orders():
    orders = {tuple(permute(np.arange(50), 50, seed=s, epoch=e)) for s in range(10) for e in range(10)}
    assert len(orders) == 100


def test_spreads_a_prefix_over_the_whole_range():
    """The mean of the first tenth of many orders is near the middle: within 5 standard errors."""
    size, orders = 1000, 200
    means = [permute(np.arange(100), size, seed=seed, epoch=0).mean() for seed in range(orders)]
    error = size / np.sqrt(12 * 100 * orders)
    assert abs(np.mean(means) - size / 2) < 5 * error
