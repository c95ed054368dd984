"""What a buffer of gradients holds, and what that is compared with."""

from __future__ import annotations

import torch


def taken(buffer):
    """{name: gradient}, copied out of the buffer."""
    views = buffer.chunk.views(buffer.take().clone())
    return dict(zip(buffer.chunk.names, views, strict=True))


def assert_equal(got, expected, tolerance=1e-13):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].to(value.dtype), value, rtol=tolerance, atol=tolerance, msg=name)
