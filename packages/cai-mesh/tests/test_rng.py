"""Random numbers are those of the global tensor on every layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh import rng
from cai_mesh.layout import Layout, Shard

KEY = rng.key(7, 3, "layers.0.weight")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_every_layout_draws_the_same(rows, columns, degree, dim, packed):
    size = (rows, columns)[dim]
    shard = Shard(dim, (size // 2, size - size // 2) if packed else None)
    for fill in (rng.uniform_, rng.normal_, rng.truncated_normal_):
        full = fill(torch.empty(rows, columns, dtype=torch.float64), KEY)
        for index in range(degree):
            layout = Layout((rows, columns)).then("tp", degree, index, shard)
            local = fill(torch.empty(layout.local_shape, dtype=torch.float64), KEY, layout=layout)
            for where, box in layout.slices():
                assert torch.equal(local[where], full[box.slices()])


def test_blocks_do_not_change_the_numbers(monkeypatch):
    full = rng.uniform_(torch.empty(33, 5), KEY)
    monkeypatch.setattr(rng, "_BLOCK", 7)
    assert torch.equal(rng.uniform_(torch.empty(33, 5), KEY), full)
    assert rng.uniform_(torch.empty(()), KEY) == full[0, 0]


def ks(sample, distribution):
    """Kolmogorov-Smirnov statistic times sqrt(n); above 1.95 in one of a thousand good samples."""
    x = sample.double().flatten().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    cdf = distribution(x)
    return float(torch.maximum((steps[1:] - cdf).max(), (cdf - steps[:-1]).max())) * math.sqrt(n)


def test_distributions():
    x = torch.empty(200_000, dtype=torch.float64)
    rng.uniform_(x, KEY, -1, 3)
    assert ks(x, lambda v: (v + 1) / 4) < 1.95
    rng.normal_(x, KEY, 2.0, 3.0)
    assert ks(x, lambda v: torch.special.ndtr((v - 2) / 3)) < 1.95
    assert float(x.mean()) == pytest.approx(2, abs=0.03)
    assert float(x.std()) == pytest.approx(3, abs=0.03)
    rng.truncated_normal_(x, KEY, 0.0, 1.0, -1.0, 2.0)
    low, high = torch.special.ndtr(torch.tensor([-1.0, 2.0], dtype=torch.float64))
    assert x.min() >= -1
    assert x.max() <= 2
    assert ks(x, lambda v: (torch.special.ndtr(v) - low) / (high - low)) < 1.95


def test_streams_differ():
    keys = {rng.key(*k) for k in [(1, "a"), (2, "a"), (1, "b"), ("1", "a"), (1, "a", 0), ("1a",)]}
    assert len(keys) == 6
    a, b = (rng.normal_(torch.empty(50_000), k) for k in (rng.key(1), rng.key(2)))
    assert abs(float((a * b).mean())) < 0.03


def test_dropout_is_that_of_the_full_tensor():
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    out = rng.dropout(x, 0.4, KEY)
    (grad,) = torch.autograd.grad(out.sum(), x)
    kept = grad != 0
    torch.testing.assert_close(grad[kept], torch.full_like(grad[kept], 1 / 0.6))
    torch.testing.assert_close(out, x * grad)
    assert 0 < kept.sum() < kept.numel()
    for index in range(2):
        layout = Layout((8, 6)).then("tp", 2, index, Shard(1))
        part = x[:, 3 * index : 3 * index + 3]
        assert torch.equal(rng.dropout(part, 0.4, KEY, layout=layout), out[:, 3 * index : 3 * index + 3])
    assert rng.dropout(x, 0.0, KEY) is x
    share = (rng.dropout(torch.ones(100_000), 0.4, KEY) == 0).double().mean()
    assert float(share) == pytest.approx(0.4, abs=0.01)


def test_permutation():
    order = rng.permutation(1000, KEY)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert not torch.equal(order, rng.permutation(1000, rng.key(8)))


def test_seeding_torch_depends_on_step_and_indices():
    def draw(*args):
        rng.seed_torch(*args)
        return torch.rand(1).item()

    cases = [(1, 0), (1, 1), (2, 0), (1, 0, {"dp_shard": 0}), (1, 0, {"dp_shard": 1}), (1, 0, {"pp": 1})]
    assert len({draw(*case) for case in cases}) == len(cases)
    assert draw(1, 0, {"pp": 1, "dp_shard": 2}) == draw(1, 0, {"dp_shard": 2, "pp": 1})
