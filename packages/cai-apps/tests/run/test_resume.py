"""N + N steps equal 2N steps: bitwise on the same layout, within tolerance on another; exports open in transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import Case, full, model_config, parameters_of, run_config, session_of, train_steps, twin

from cai_apps.applications.language.task import export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.data.tokenizer import train_tokenizer
from cai_mesh import checkpoint
from cai_mesh.testing import assert_same_as_one_device, run_ranks

HALF = 4
LAYOUTS = {
    "one": Case(),
    "data2-zero1": Case(data=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2": Case(tensor=2),
    "pipeline2": Case(pipeline=2),
    "2x2x2": Case(data=2, tensor=2, pipeline=2),
    "chunks2": Case(pipeline=2, chunks=2, schedule="interleaved"),
    "context2": Case(context=2, zero=3),
    "data2-context2": Case(data=2, context=2, attention="ulysses", zero=2),
}


def through(model, case, dtype):
    session = session_of(model, case, dtype, 2 * HALF)
    losses, _ = train_steps(session, case, 0, 2 * HALF)
    return losses, full(parameters_of(session))


def first_half(model, case, dtype, directory):
    session = session_of(model, case, dtype, 2 * HALF)
    train_steps(session, case, 0, HALF)
    checkpoint.save(directory, session.state(), step=HALF)


def second_half(model, case, dtype, directory):
    session = session_of(model, case, dtype, 2 * HALF)
    for p in session.model.parameters():
        p.data.zero_()  # whatever was not loaded shows
    session.loaded(checkpoint.load(directory, session.state()), HALF)
    losses, _ = train_steps(session, case, HALF, 2 * HALF)
    return losses, full(parameters_of(session))


@pytest.mark.parametrize(
    ("model", "layout"), [("llama", "2x2x2"), ("gpt2", "data2-zero3"), ("gpt2", "pipeline2")]
)
def test_on_the_same_layout_it_is_bitwise(model, layout, tmp_path):
    case = LAYOUTS[layout]
    losses, parameters = run_ranks(case.world, through, model, case, "fp32", timeout=240)[0]
    run_ranks(case.world, first_half, model, case, "fp32", str(tmp_path), timeout=240)
    resumed, again = run_ranks(case.world, second_half, model, case, "fp32", str(tmp_path), timeout=240)[0]
    assert resumed == losses[HALF:]
    assert all(torch.equal(again[n], parameters[n]) for n in parameters)


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("llama", "one", ("data2-zero1", "2x2x2", "context2")),
        ("gpt2", "2x2x2", ("one", "data2-zero3", "tensor2", "pipeline2", "chunks2")),
        ("llama", "data2-zero3", ("pipeline2",)),
        ("gpt2", "chunks2", ("one",)),
        ("llama", "tensor2", ("data2-zero1",)),
        ("gpt2", "pipeline2", ("tensor2",)),
        ("llama", "context2", ("data2-zero1", "data2-context2")),
    ],
)
def test_on_another_layout_it_is_the_same_run(model, saved, loaded, tmp_path):
    losses, _, parameters = twin(model, "fp64", 2 * HALF)
    run_ranks(LAYOUTS[saved].world, first_half, model, LAYOUTS[saved], "fp64", str(tmp_path), timeout=240)
    for other in loaded:
        args = (model, LAYOUTS[other], "fp64", str(tmp_path))
        resumed, again = run_ranks(LAYOUTS[other].world, second_half, *args, timeout=240)[0]
        assert max(abs(a - b) for a, b in zip(resumed, losses[HALF:], strict=True)) < 1e-9
        assert_same_as_one_device(again, parameters, tolerance=1e-7)


def stored(model, case, directory):
    """Load on a layout; full parameters and optimizer state, to compare with what was saved bit for bit."""
    session = session_of(model, case, "fp32", 2 * HALF)
    state = session.state()
    values = checkpoint.load(directory, state)
    tensors = {n: v for n, v in state.items() if n != "optimizer.param_groups"}
    return full(tensors), values["optimizer.param_groups"]


@pytest.mark.parametrize("saved", ["one", "2x2x2"])
def test_values_are_bitwise_on_every_layout(saved, tmp_path):
    run_ranks(LAYOUTS[saved].world, first_half, "gpt2", LAYOUTS[saved], "fp32", str(tmp_path), timeout=240)
    expected, groups = run_ranks(1, stored, "gpt2", LAYOUTS["one"], str(tmp_path), timeout=240)[0]
    assert float(expected["optimizer.transformer.wte.weight.step"]) == HALF
    for name in ("data2-zero1", "data2-zero3", "tensor2", "pipeline2", "2x2x2", "chunks2"):
        got, other = run_ranks(
            LAYOUTS[name].world, stored, "gpt2", LAYOUTS[name], str(tmp_path), timeout=240
        )[0]
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in expected)
        assert other[0]["lr"] == groups[0]["lr"]


def export(model, case, directory, tokenizer):
    session = session_of(model, case, "fp32", 2)
    train_steps(session, case, 0, 2)
    export_hf(session, directory, tokenizer)
    return full(parameters_of(session)) if dist.get_rank() == 0 else full(parameters_of(session)) and None


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_export_opens_with_the_trained_weights(model, tmp_path):
    from transformers import AutoModelForCausalLM

    train_tokenizer(["some text"], 300).save_pretrained(tmp_path / "tokenizer")
    case = LAYOUTS["2x2x2"]
    trained = run_ranks(
        case.world, export, model, case, tmp_path / "hf", tmp_path / "tokenizer", timeout=240
    )[0]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {n: True for n, p in opened.named_parameters() if torch.equal(p, trained[n])} == dict.fromkeys(
        trained, True
    )
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def fine_tuned(model, case, directory):
    config = run_config(case, "fp32", 2)
    config = replace(config, model=replace(config.model, name=str(directory), weights="pretrained"))
    session = apply(config, workload(config, model_config(model)), device=torch.device("cpu"))
    before = full(parameters_of(session))
    losses, _ = train_steps(session, case, 0, 2)
    return before, losses


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_pretrained_weights_are_read_on_every_layout(model, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    saved = AutoModelForCausalLM.from_config(model_config(model))
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    losses = []
    for name in ("one", "2x2x2", "data2-zero3"):
        case = LAYOUTS[name]
        got, loss = run_ranks(case.world, fine_tuned, model, case, tmp_path, timeout=240)[0]
        assert all(torch.equal(got[n], p) for n, p in saved.named_parameters())
        losses.append(loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
