"""What other libraries write of a sharded or offloaded model is whole, and they go on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from examples.parts import (
    WRITERS,
    loaded_from_itself,
    loaded_from_rank_0,
    other_weights,
    refused_writers,
    whole_state_loaded,
)
from examples.ways_out import FORMS, adamw, build, by_accelerate, by_fabric, formed, train
from safetensors.torch import load_file

from cai_mesh.testing import RankError, RankGroup
from cai_zero import full_state_dict

RANKS = 2


@pytest.fixture(scope="module")
def ranks():
    return RankGroup(RANKS)


def on(ranks, form, fn, *args):
    return [fn(*args)] if form == "offload" else ranks.run(fn, *args)


def plain_losses():
    model = build()
    return train(model, adamw(model.parameters()), range(4))


def close(form):
    return {"rel": 2e-2} if form.endswith("bf16") else {"rel": 2e-5}


def saved_by_accelerate(form, folder):
    accelerator, model, optimizer = by_accelerate(form)
    first = train(model, optimizer, range(2), accelerator.backward)
    accelerator.save_model(model, f"{folder}/model")
    accelerator.save_state(f"{folder}/state")
    full = full_state_dict(model, weights=getattr(optimizer.optimizer, "weights", lambda: None)())
    return first + train(model, optimizer, range(2, 4), accelerator.backward), full


def resumed_by_accelerate(form, folder):
    accelerator, model, optimizer = by_accelerate(form)
    accelerator.load_state(f"{folder}/state")
    return train(model, optimizer, range(2, 4), accelerator.backward)


@pytest.mark.parametrize("form", FORMS)
def test_accelerate_saves_whole_tensors_and_goes_on(form, ranks, tmp_path: Path):
    got, full = on(ranks, form, saved_by_accelerate, form, str(tmp_path))[0]
    assert got == pytest.approx(plain_losses(), **close(form))
    for file in ("model", "state"):
        written = load_file(tmp_path / file / "model.safetensors")
        assert {*written} | {"lm_head.weight", "model.embed_tokens.weight"} == {*full}
        assert all(torch.equal(written[name], full[name]) for name in written)
    for result in on(ranks, form, resumed_by_accelerate, form, str(tmp_path)):
        assert result == got[2:], "a resumed run is not the run"
    # on other ranks, in another stage, and by a plain loop
    other = "zero3" if form != "zero3" else "zero1"
    for result in ranks.run(resumed_by_accelerate, other, str(tmp_path)):
        assert result == pytest.approx(got[2:], **close(form))
    model = build()
    model.load_state_dict(load_file(tmp_path / "state" / "model.safetensors"), strict=False)
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "state" / "optimizer.bin"))
    assert train(model, optimizer, range(2, 4)) == pytest.approx(got[2:], **close(form))


def saved_by_fabric(form, folder):
    fabric, model, optimizer = by_fabric(form)
    first = train(model, optimizer, range(2), fabric.backward)
    fabric.save(f"{folder}/state.pt", {"model": model, "optimizer": optimizer, "step": 2})
    return first + train(model, optimizer, range(2, 4), fabric.backward)


def resumed_by_fabric(form, folder):
    fabric, model, optimizer = by_fabric(form)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(f"{folder}/state.pt", state) == {}
    assert state["step"] == 2 and state["optimizer"] is optimizer
    return train(model, optimizer, range(2, 4), fabric.backward)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "offload"])
def test_fabric_saves_whole_tensors_and_goes_on(form, ranks, tmp_path: Path):
    got = ranks.run(saved_by_fabric, form, str(tmp_path))[0]
    assert got == pytest.approx(plain_losses(), **close(form))
    for result in ranks.run(resumed_by_fabric, form, str(tmp_path)):
        assert result == got[2:], "a resumed run is not the run"
    saved = torch.load(tmp_path / "state.pt")
    model = build()
    model.load_state_dict(saved["model"])
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, range(2, 4)) == pytest.approx(got[2:], **close(form))


@pytest.mark.parametrize("form", ["zero3", "tensor"])
def test_no_file_has_parts_under_the_names_of_wholes(form, ranks):
    for said in on(ranks, form, refused_writers, form):
        assert {name for name, text in said.items() if "whole" not in text} == set(), said


@pytest.mark.parametrize("writer", ["safetensors save_model", "save_pretrained", "dcp"])
def test_an_offloaded_model_is_written_whole(writer, tmp_path: Path):
    """Its parameters lie in buffers, and all of them are in one process."""
    model, _ = formed("offload")
    WRITERS[writer](model, str(tmp_path / "written"))
    expected = build().state_dict()
    if writer == "dcp":
        written = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(written, checkpoint_id=str(tmp_path / "written"), no_dist=True)
    else:
        single = tmp_path / "written"
        written = load_file(single / "model.safetensors" if single.is_dir() else single)
    assert {*written} | {"lm_head.weight", "model.embed_tokens.weight"} == {*expected}
    assert all(torch.equal(value, expected[name]) for name, value in written.items())


@pytest.mark.parametrize(
    ("form", "what"),
    [("zero1", "state"), ("zero2", "state"), ("zero3", "state"), ("tensor", "state"), ("zero3", "weights")],
)
def test_state_of_rank_0_is_not_that_of_the_others(form, what, ranks):
    with pytest.raises(RankError, match=r"rank 1: [^\0]*is not of the parts that this rank has") as caught:
        ranks.run(loaded_from_rank_0, form, what)
    assert "(rank 0 of 2)" in str(caught.value)


@pytest.mark.parametrize("form", ["zero0", "zero1", "zero3", "tensor", "offload"])
def test_each_rank_goes_on_from_its_own(form, ranks):
    for got, expected in on(ranks, form, loaded_from_itself, form):
        assert got == expected


@pytest.mark.parametrize("form", ["zero1", "zero3", "tensor", "offload"])
def test_a_whole_state_dict_is_taken_by_parts(form, ranks):
    plain = other_weights()
    expected = train(plain, adamw(plain.parameters()), range(2, 4))
    for got in on(ranks, form, whole_state_loaded, form):
        assert got == pytest.approx(expected[: len(got)], rel=2e-5)


def saved_by_storage(folder):
    """What accelerate does without cai's `prepare`, in one process: tied tensors are found by their storage."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model, _ = formed("zero1")
    Accelerator(cpu=True).save_model(model, folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_parameters_of_a_chunk_have_a_storage_each(tmp_path: Path):
    state = saved_by_storage(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert {*state} - {*written} <= {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(torch.equal(written[name], state[name]) for name in written)
