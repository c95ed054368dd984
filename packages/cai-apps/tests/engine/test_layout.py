"""Layers in groups of one window each: few of them, with little room to spare."""

from __future__ import annotations

import pytest

from cai_apps.engine.layout import LayerCache, layout_of


def layers(*windows, forms=()):
    return {
        f"layers.{number}": LayerCache(64, forms[number] if forms else "alike", window)
        for number, window in enumerate(windows)
    }


GEMMA_4B = [None if number % 6 == 5 else 1024 for number in range(34)]
"""Gemma 3 4B: every sixth layer sees all."""
GPT_OSS = [None if number % 2 else 128 for number in range(24)]


@pytest.mark.parametrize(
    ("windows", "groups", "size"),
    [
        (GEMMA_4B, 6, 6),
        (GPT_OSS, 2, 12),
        ([4096] * 32, 1, 32),  # Mistral
        ([None] * 3, 1, 3),
        ([None, *[64] * 31], 9, 4),
    ],
)
def test_published_models(windows, groups, size):
    layout = layout_of(layers(*windows), 131072)
    assert (len(layout.windows), layout.layers) == (groups, size)
    assert len({*layout.places.values()}) == len(
        windows
    )  # no two layers have the same memory in the same blocks
    for number, window in enumerate(windows):
        group, place = layout.places[f"layers.{number}"]
        assert layout.windows[group] == window and place < size


def test_a_window_that_holds_the_longest_request_leaves_nothing_behind():
    assert layout_of(layers(4096, 4096), 4096).windows == (None,)
    assert layout_of(layers(4096, 4096), None).windows == (4096,)


def test_layers_of_several_forms_have_the_same_blocks():
    assert layout_of(layers(None, 8, forms=["wide", "narrow"]), 64).windows == (None,)
