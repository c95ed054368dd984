"""Rows over ranks in a session: every layout trains as a plain loop does that has whole rows."""

from __future__ import annotations

import functools

import pytest
import torch
from layouts import Case, batch, microbatches_of, model_config, session_of, shifted, trained, twin
from routed_toys import plain_training, routed_training
from torch.nn import functional as F

from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_apps.config.sections import Experts
from cai_mesh.testing import assert_same_as_one_device, run_ranks

STEPS = 3
TWO = {
    "gather": Case(context=2),
    "documents, ulysses": Case(context=2, attention="ulysses", zero=0, documents=True),
    "ring, documents": Case(context=2, attention="ring", zero=3, documents=True, recompute="full"),
}
TWO_MORE = {
    "ulysses": Case(context=2, attention="ulysses", zero=3),
    "documents": Case(context=2, zero=2, documents=True),
    "recompute": Case(context=2, recompute="full", documents=True),
    "most": Case(context=2, recompute="most"),
    "kernels": Case(context=2, kernels="on", documents=True),
    "ring": Case(context=2, attention="ring"),
}
FOUR = {
    "data2-zero3": Case(data=2, context=2, zero=3, documents=True),
    "tensor2-sequence": Case(tensor=2, sequence=True, context=2, documents=True),
    "pipeline2": Case(pipeline=2, context=2, documents=True),
}
FOUR_MORE = {
    "replicate2": Case(replicate=2, context=2, zero=2),
    "tensor2": Case(tensor=2, context=2, documents=True),
    "tensor2, ulysses": Case(tensor=2, context=2, attention="ulysses"),
    "tensor2, ring": Case(tensor=2, context=2, attention="ring", documents=True),
    "pipeline2-zb-v-zero3": Case(pipeline=2, chunks=2, schedule="zb-v", zero=3, unshard="step", context=2),
}
COMPILED = {
    mode: Case(context=2, attention=mode, compile="on", recompute="selective", documents=True)
    for mode in ("gather", "ulysses", "ring")
}
MODELS = ("llama", "gpt2", "mistral", "gpt_oss", "olmoe")

expected = functools.cache(functools.partial(twin, dtype="fp64", steps=STEPS))


def trained_each(cases):
    return {key: trained(*case, "fp64", STEPS) for key, case in cases.items()}


def check(cases: dict[tuple[str, str], Case], world: int) -> None:
    """Compare all of them, in ranks that are started once."""
    all_results = run_ranks(
        world, trained_each, {key: (key[0], case) for key, case in cases.items()}, timeout=300
    )
    for key, case in cases.items():
        results = [rank_results[key] for rank_results in all_results]
        losses, gradients, parameters = expected(key[0], one_by_one=case.documents)
        got_losses, got_gradients, got_parameters = results[0]
        in_float32 = (
            case.kernels == "on" or case.compile == "on" or key[0] in ("gemma3_text", "olmoe", "gpt_oss")
        )
        exact = 1e-6 if in_float32 else 1e-8
        assert got_losses == pytest.approx(losses, rel=exact), key
        assert all(other == got_losses for other in results[1:]), key
        assert_same_as_one_device(got_gradients, gradients, tolerance=exact)
        if not in_float32:
            assert_same_as_one_device(got_parameters, parameters, tolerance=1e-7)


def test_two_ranks_equal_a_plain_loop():
    kinds = {("gemma3_text", "documents"): TWO_MORE["documents"]}
    check({("llama", name): case for name, case in TWO.items()} | kinds, 2)


@pytest.mark.matrix
def test_two_ranks_of_all_options():
    kinds = {(model, "documents"): TWO_MORE["documents"] for model in MODELS}
    check({("llama", name): case for name, case in TWO_MORE.items()} | kinds, 2)


def test_four_ranks_equal_a_plain_loop():
    check({("llama", name): case for name, case in FOUR.items()}, 4)


@pytest.mark.matrix
def test_four_ranks_of_all_options():
    check({("llama", name): case for name, case in FOUR_MORE.items()}, 4)


@pytest.mark.matrix
def test_compiled_layers_equal_a_plain_loop():
    check({("llama", name): case for name, case in COMPILED.items()}, 2)


def looked_at(case: Case):
    """The loss, what is predicted right, and all predictions of the first microbatch."""
    session = session_of("llama", case, "fp64")
    batches, _ = microbatches_of(session, case, 0)
    evaluation = session.evaluate(batches[:1], total=1.0)
    assert evaluation.correct is not None
    return float(evaluation.loss), float(evaluation.correct), session.predict(batches[0])


def test_validation_and_predictions_are_of_whole_rows():
    """Alike on all ranks, and those of the model of transformers."""
    model = materialize(
        meta_model(model_config("llama")),
        initializer,
        seed=7,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    ids, labels = batch(0)
    logits = model(input_ids=ids[:2]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), shifted(labels[:2]).flatten(), reduction="sum")
    for got_loss, correct, predicted in run_ranks(4, looked_at, Case(context=2, pipeline=2)):
        assert got_loss == pytest.approx(float(loss.detach()), rel=1e-9)
        assert correct == int((logits.argmax(-1) == shifted(labels[:2])).sum())
        assert torch.equal(predicted, logits.argmax(-1))


ROUTED = {
    "context2": Case(context=2, microbatches=2),
    "context2-experts2": Case(context=2, experts=2, zero=2, microbatches=2),
    "data2-experts2": Case(data=2, context=2, experts=2, zero=3, microbatches=1),
    "tensor2-sequence": Case(tensor=2, sequence=True, context=2, microbatches=2),
    "pipeline2": Case(pipeline=2, context=2, microbatches=2),
}


@pytest.mark.parametrize(
    "worlds", [(2,), pytest.param((2, 4), marks=pytest.mark.matrix)], ids=["some", "all"]
)
def test_routers_of_parts_of_rows_are_balanced_as_those_of_whole_ones(worlds):
    """Losses of routers, loads and weights after three steps are those of transformers on whole rows."""
    experts = Experts(aux_loss=0.05, z_loss=0.02)
    losses, numbers, parameters = plain_training("olmoe", experts, 2)
    for world in worlds:
        chosen = {name: case for name, case in ROUTED.items() if case.world == world}
        results = run_ranks(world, routed_each, chosen, experts, timeout=300)
        for name in chosen:
            got_losses, got_numbers, got_parameters = results[0][name]
            assert got_losses == pytest.approx(losses, rel=1e-5), name
            for got, (balance, z) in zip(got_numbers, numbers, strict=True):
                assert got["aux_loss"] == pytest.approx(balance, rel=1e-5), name
                assert got["z_loss"] == pytest.approx(z, rel=1e-4), name
                assert got["dropped_share"] == 0, name
            assert all(other[name][1] == got_numbers for other in results[1:]), name
            assert_same_as_one_device(got_parameters, parameters, tolerance=1e-5)


def routed_each(cases, experts):
    return {name: routed_training("olmoe", case, experts) for name, case in cases.items()}
