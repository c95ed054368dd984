"""Models that classify equal a plain loop over transformers' own on every layout: losses and final weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from classification_toys import CLASSES, KINDS, STEPS, batch, config_of, saved, twin
from layouts import BATCH, Case, full, parameters_of, rate

from cai_apps.applications.classification.model import config_for, kind_of, pretrained
from cai_apps.applications.classification.workload import workload
from cai_apps.compose.apply import apply
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index
from cai_mesh.testing import assert_same_as_one_device, run_ranks

LAYOUTS = {
    "one": Case(),
    "one-recompute": Case(recompute="full"),
    "one-compiled": Case(compile="on"),
    "one-kernels": Case(kernels="on"),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2": Case(tensor=2),
    "pipeline2": Case(pipeline=2),
    "data2-tensor2": Case(data=2, tensor=2, zero=3),
    "tensor2-pipeline2": Case(tensor=2, pipeline=2),
}
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
    config = config_of(directory, LAYOUTS[layout])
    model = config_for(str(directory), CLASSES)
    what = kind_of(model, kind)
    names = tuple(name for name in batch(kind, 0) if name != "labels")
    fill = pretrained(str(directory), directory, model, what)
    session = apply(config, workload(config, model, what, names, fill), device=torch.device("cpu"))
    share = BATCH // degree(session.mesh, DATA_AXES)
    first, losses = index(session.mesh, DATA_AXES) * share, []
    for step in range(STEPS):
        rows = {name: value[first : first + share] for name, value in batch(kind, step).items()}
        if "pixel_values" in rows:
            rows["pixel_values"] = rows["pixel_values"].double()
        pieces = {name: value.split(config.train.microbatch_size) for name, value in rows.items()}
        microbatches = [
            dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)
        ]
        loss = session.step(microbatches, total=float(BATCH)).clone()
        session.update(rate(step), float(session.norm()))
        all_reduce(loss, group(session.mesh, DATA_AXES))
        losses.append(float(loss))
    last = {name: value.clone() for name, value in full(parameters_of(session)).items()}
    return (losses, last) if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("classifiers")
    return {kind: saved(kind, home) for kind in KINDS}


@pytest.fixture(scope="module")
def plain(directories):
    return {kind: twin(kind, directories[kind]) for kind in KINDS}


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
