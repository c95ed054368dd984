"""Every algorithm on every layout equals a plain loop over single texts: losses, gradients and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import BATCH, Case, full, gradients_of, model_config, parameters_of, rate
from preference_toys import OPTIONS, config_of, preferences, twin, units_of_steps

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.reference import Comparison, log_probs
from cai_apps.applications.alignment.workload import workload
from cai_apps.applications.language.config import LoRA
from cai_apps.compose.apply import apply
from cai_apps.compose.forward_only import freeze
from cai_apps.data.batches import Batches
from cai_apps.data.preference.rows import PreferenceRows
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index
from cai_mesh.testing import assert_same_as_one_device, run_ranks

CPU = torch.device("cpu")
FP8 = {
    "fp8": Case(linear="fp8"),
    "fp8-data2-zero3": Case(data=2, zero=3, linear="fp8"),
    "fp8-pipeline2": Case(pipeline=2, linear="fp8"),
}
LAYOUTS = FP8 | {
    "one": Case(),
    "one-microbatches": Case(microbatches=8),
    "one-recompute": Case(recompute="full"),
    "one-kernels": Case(kernels="on"),
    "one-compiled": Case(compile="on", recompute="selective"),
    "host": Case(),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3, kernels="on"),
    "tensor2": Case(tensor=2),
    "tensor2-sequence-kernels": Case(tensor=2, sequence=True, kernels="on"),
    "tensor2-kernels": Case(tensor=2, kernels="on"),
    "pipeline2": Case(pipeline=2),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", unshard="step"),
    "experts2": Case(data=2, experts=2),
    "experts2-context2-zero3": Case(data=2, experts=2, context=2, zero=3),
    "context2": Case(context=2),
    "context2-ring-kernels": Case(context=2, attention="ring", kernels="on"),
    "context2-ulysses": Case(context=2, attention="ulysses", recompute="full"),
    "context2-zero3": Case(data=2, context=2, zero=3),
    "context2-tensor2-sequence-kernels": Case(context=2, tensor=2, sequence=True, kernels="on"),
    "context2-pipeline2": Case(context=2, pipeline=2),
    "tensor4-2d": Case(tensor=4, mode="2d"),
    "data2-tensor2-zero3-kernels": Case(data=2, tensor=2, zero=3, kernels="on"),
    "tensor2-pipeline2-kernels": Case(
        tensor=2, pipeline=2, chunks=2, schedule="zb-v", unshard="step", kernels="on"
    ),
    "2x2x2-zero1": Case(data=2, tensor=2, pipeline=2),
    "data2-pipeline2-zero3": Case(data=2, pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step"),
}
STAYING = ("data2-zero3", "tensor2", "pipeline2", "context2")
"""Layouts whose reference stays beside the model."""
SOME = ("dpo", "kto", "reward", "orpo")
WIDE = {
    1: [("one", algorithm) for algorithm in OPTIONS]
    + [
        (layout, algorithm)
        for layout in ("one-microbatches", "one-kernels", "one-recompute", "one-compiled", "host")
        for algorithm in SOME
    ],
    2: [
        (layout, algorithm)
        for layout in LAYOUTS
        if LAYOUTS[layout].world == 2 and layout not in FP8
        for algorithm in (*SOME, "ipo", "simpo", "dpo-shared", "reward-shared")
        if not ("context" in layout or "experts" in layout) or "shared" not in algorithm
    ],
    4: [(layout, algorithm) for layout in LAYOUTS if LAYOUTS[layout].world == 4 for algorithm in SOME],
    8: [("2x2x2-zero1", algorithm) for algorithm in SOME],
}
"""Pairs of the matrix."""
TOGETHER = [
    ("data2-zero3", "kto"),
    ("tensor2-sequence-kernels", "dpo-shared"),
    ("pipeline2-zb-v", "reward"),
    ("context2", "kto"),
    ("context2-ulysses", "reward"),
    ("experts2", "dpo"),
]
"""Pairs of the suite: each dimension once, with algorithms that count in different ways."""


def model_of(layout: str) -> str:
    return "qwen3_moe" if "experts" in layout else "llama"


def session_of(layout: str, algorithm: str, form: str, lora: bool):
    config = config_of(algorithm, LAYOUTS[layout], form)
    if lora:
        config = replace(config, lora=LoRA(rank=4, alpha=8))
    if layout == "host":
        config = replace(config, memory=replace(config.memory, residency="host"))
    comparison = Comparison(config)
    plain = workload(config, model_config(model_of(layout)), comparison)
    if form == "model":
        comparison.model = freeze(config, plain, device=CPU)
    return config, plain


def trained(
    cases: list[tuple[str, str]], directories: dict[str, str], form: str = "computed", lora: bool = False
):
    return [_trained(*case, directories, form, lora or form == "adapter") for case in cases]


def _trained(layout: str, algorithm: str, directories: dict[str, str], form: str, lora: bool):
    rows = _rows(directories, algorithm)
    config, plain = session_of(layout, algorithm, form, lora)
    if form == "computed" and ALGORITHMS[config.alignment.algorithm].reference:
        config = replace(config, data=replace(config.data, cache=directories["cache"]))
        key = f"{layout}-{algorithm}-{lora}"
        array = log_probs(config, plain, [rows], rows.source.documents.count, key, CPU)
        rows = replace(rows, reference=array)
    session = apply(config, plain, device=CPU)
    ranks = (index(session.mesh, DATA_AXES), degree(session.mesh, DATA_AXES))
    batches = Batches(rows, BATCH, config.train.microbatch_size, *ranks, seed=config.train.seed)
    losses, first, measures, is_offloaded = [], {}, [], session.weights.offloaded is not None
    for step, numbers in enumerate(units_of_steps(rows)):
        loss = session.step(batches.at(step * BATCH), total=float(len(numbers))).clone()
        if step == 0:
            first = {} if is_offloaded else _copies(gradients_of(session))
        session.update(rate(step), float(session.norm()))
        for value in (loss, session.measures):
            all_reduce(value, group(session.mesh, DATA_AXES))
        losses.append(float(loss))
        measures.append(session.measures.tolist())
    last = {} if is_offloaded else _copies(parameters_of(session))
    return (losses, first, last, measures) if dist.get_rank() == 0 else None


def _copies(boxed) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in full(boxed).items()}


def _rows(directories: dict[str, str], algorithm: str) -> PreferenceRows:
    shares = algorithm.endswith("-shared")
    return PreferenceRows.of(*_source(directories, algorithm), shares_prompts=shares)


def _source(directories: dict[str, str], algorithm: str):
    from cai_apps.data.documents import open_documents
    from cai_apps.data.preference.prepare import Preferences

    kind = "judged" if algorithm == "kto" else "pairs"
    source = Preferences(open_documents(Path(directories[kind])), kind)
    return source, np.arange(source.units), 24


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    home = tmp_path_factory.mktemp("preferences")
    for kind in ("pairs", "judged"):
        preferences(home / kind, kind)
    (home / "cache").mkdir(mode=0o700)
    return {name: str(home / name) for name in ("pairs", "judged", "cache")}


@pytest.fixture(scope="module")
def plain(directories):
    runs = {}

    def of(algorithm: str, model: str = "llama"):
        if (algorithm, model) not in runs:
            runs[algorithm, model] = twin(algorithm, _rows(directories, algorithm), model)
        return runs[algorithm, model]

    return of


@pytest.mark.matrix
@pytest.mark.parametrize("world", WIDE)
def test_all_layouts_equal_single_texts(world, directories, plain):
    assert_equal_to_single_texts(world, WIDE[world], directories, plain)


def test_layouts_equal_single_texts(directories, plain):
    assert_equal_to_single_texts(2, TOGETHER, directories, plain)


def assert_equal_to_single_texts(world, cases, directories, plain):
    results = run_ranks(world, trained, cases, directories, timeout=500)[0]
    measured = {}
    for (layout, algorithm), (losses, first, last, measures) in zip(cases, results, strict=True):
        # norms compute in float32, and a grid, a compiler or a shared prompt adds them up in another order
        exact = 1e-6 if "compiled" in layout or "2d" in layout or "shared" in algorithm else 1e-9
        expected = plain(algorithm, model_of(layout))
        assert losses == pytest.approx(expected[0], rel=exact), (layout, algorithm)
        if layout != "host":
            assert_same_as_one_device(first, expected[1], tolerance=max(exact, 1e-8))
            if exact == 1e-9:  # else AdamW steps gradients that are nothing but rounding as far as any other
                assert_same_as_one_device(last, expected[2], tolerance=1e-7)
        later = measures[1:]  # before the first update, rounding says which of equal rewards is larger
        np.testing.assert_allclose(
            later, measured.setdefault((algorithm, model_of(layout)), later), rtol=1e-5, atol=1e-7
        )


@pytest.mark.matrix
@pytest.mark.parametrize("layout", FP8)
def test_with_fp8_layers_losses_are_those_of_single_texts(layout, directories, plain):
    """Rows are scaled one by one in forwards; in the products of weights' gradients, all rows of a microbatch."""
    algorithms = ("dpo", "kto", "reward", "orpo")
    cases = [(layout, algorithm) for algorithm in algorithms]
    results = run_ranks(LAYOUTS[layout].world, trained, cases, directories, timeout=500)[0]
    for algorithm, (losses, first, *_) in zip(algorithms, results, strict=True):
        expected, gradients, _ = twin(
            algorithm, PreferenceRows.of(*_source(directories, algorithm)), linear="fp8"
        )
        assert losses[0] == pytest.approx(expected[0], rel=1e-5), algorithm
        # a gradient's rounding depends on what a rank's microbatch holds, and AdamW steps every element equally far
        assert losses == pytest.approx(expected, rel=5e-2), algorithm
        unrounded = plain(algorithm)[1]
        for name, gradient in gradients.items():
            size = gradient.norm()
            assert (first[name] - gradient).norm() < 0.1 * size, (algorithm, name)
        name = "model.layers.0.mlp.up_proj.weight"
        assert (first[name] - unrounded[name]).norm() > 1e-2 * unrounded[name].norm()


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["model", "adapter"])
def test_all_references_that_stay(form, directories):
    assert_staying(
        form, [(layout, algorithm) for layout in STAYING for algorithm in ("dpo", "kto")], directories
    )


def test_references_that_stay(directories):
    assert_staying("adapter", [("data2-zero3", "kto")], directories)


def assert_staying(form, cases, directories):
    """A second model, and one whose adapters are off, give what is computed before the first step."""
    both = run_ranks(2, trained, cases, directories, form, timeout=500)[0]
    before = run_ranks(2, trained, cases, directories, "computed", lora=form == "adapter", timeout=500)[0]
    for case, (losses, *_), (expected, *_) in zip(cases, both, before, strict=True):
        assert losses == pytest.approx(expected, rel=1e-9), case
        assert len({*losses}) == len(losses)
