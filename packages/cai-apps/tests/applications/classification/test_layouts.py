"""Models that classify equal a plain loop over transformers' own on every layout: losses and final weights."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from classification_toys import KINDS, LAYOUTS, opened, saved, trained_session, twin
from layouts import full, parameters_of

from cai_mesh.testing import assert_same_as_one_device, run_ranks

TOGETHER = {
    1: [("one", kind) for kind in KINDS],
    2: [
        *(("data2-zero3", kind) for kind in ("roberta", "vit")),
        *(("tensor2", kind) for kind in KINDS),
        *(("pipeline2", kind) for kind in ("bert", "vit")),
    ],
}
WIDE = {
    world: [(name, kind) for name, case in LAYOUTS.items() if case.world == world for kind in KINDS]
    for world in (1, 2, 4)
}


def trained(cases, directories):
    return [_trained(layout, kind, directories[kind]) for layout, kind in cases]


def _trained(layout, kind, directory):
    session, _, losses = trained_session(layout, kind, directory)
    last = {name: value.clone() for name, value in full(parameters_of(session)).items()}
    return (losses, last) if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("classifiers")
    return {kind: saved(kind, home) for kind in KINDS}


@pytest.fixture(scope="module")
def plain(directories):
    return {kind: twin(kind, opened(kind, directories[kind])) for kind in KINDS}


def assert_equal(world, cases, directories, plain):
    results = run_ranks(world, trained, cases, directories, timeout=500)[0]
    for (layout, kind), (losses, last) in zip(cases, results, strict=True):
        exact = 1e-6 if "compiled" in layout or "kernels" in layout else 1e-9
        assert losses == pytest.approx(plain[kind][0], rel=exact), (layout, kind)
        if exact == 1e-9:
            assert_same_as_one_device(last, plain[kind][1], tolerance=1e-7)


@pytest.mark.parametrize("world", TOGETHER)
def test_layouts_equal_a_plain_loop(world, directories, plain):
    assert_equal(world, TOGETHER[world], directories, plain)


@pytest.mark.matrix
@pytest.mark.parametrize("world", WIDE)
def test_all_layouts_equal_a_plain_loop(world, directories, plain):
    assert_equal(world, WIDE[world], directories, plain)
