"""Noise on embeddings: the distribution and the place of transformers' hook, the same numbers under every layout."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import (
    BATCH,
    LENGTH,
    Case,
    adamw,
    batch,
    bounds,
    documents,
    full,
    gradients_of,
    model_config,
    rate,
    run_config,
    shifted,
)
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from cai_apps.applications.language.noise import (
    KEYS,
    EmbeddingNoise,
    NoisySamples,
    embedding_of,
    lengths_at,
    noise,
)
from cai_apps.applications.language.rules import check_settings
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import causal_model, initializer, meta_model
from cai_apps.data.batches import Batches
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index
from cai_mesh.errors import ConfigError, PlanError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

STEPS, ALPHA, SEED = 2, 8.0, 7
LAYOUTS = {
    "one": Case(),
    "one-microbatches": Case(microbatches=8),
    "one-recompute": Case(recompute="full"),
    "one-compiled": Case(compile="on", recompute="selective"),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2-sequence": Case(tensor=2, sequence=True),
    "pipeline2-1f1b": Case(pipeline=2),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", unshard="step"),
}
PAIRS = (("llama", True), ("gpt2", False))
"""Models, and whether their rows hold documents."""


@dataclass(frozen=True)
class Rows:
    """The batches of `layouts`, as samples."""

    of_documents: bool

    @property
    def size(self) -> int:
        return STEPS * BATCH

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, torch.Tensor]:
        found = [self._row(int(place)) for place in indices]
        return {name: torch.stack([row[name] for row in found]) for name in found[0]}

    def _row(self, place: int) -> dict[str, torch.Tensor]:
        step, row = divmod(place, BATCH)
        ids, labels = batch(step)
        more = {}
        if self.of_documents:
            labels, more = documents(step)
        whole = {"input_ids": ids, "labels": shifted(labels)} | more
        return {name: value[row] for name, value in whole.items()}


def noisy(of_documents: bool) -> NoisySamples:
    return NoisySamples(Rows(of_documents), SEED)


def total_of(step: int, of_documents: bool) -> int:
    labels = documents(step)[0] if of_documents else batch(step)[1]
    return int((labels[:, 1:] != -100).sum())


@functools.cache
def plain(name: str, of_documents: bool):
    """A plain loop over whole rows, or over documents one by one; noise is added where transformers has its hook."""
    model = materialize(
        meta_model(model_config(name)),
        initializer,
        seed=SEED,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    rows, added = noisy(of_documents), {}
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output + added["noise"])
    optimizer, losses, first = adamw(model), [], {}
    for step in range(STEPS):
        places, loss = np.arange(step * BATCH, (step + 1) * BATCH), 0.0
        taken = rows.rows(places, places)
        for row in range(BATCH):
            ends = bounds(step)[row] if of_documents else [0, LENGTH]
            for start, end in itertools.pairwise(ends):
                ids, labels = (taken[key][row : row + 1, start:end] for key in ("input_ids", "labels"))
                added["noise"] = by_hand(int(taken[KEYS][row]), start, end, model.config.hidden_size)
                logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
                part = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
                part = part / total_of(step, of_documents)
                part.backward()
                loss += part.item()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, first


def by_hand(key: int, start: int, end: int, features: int) -> torch.Tensor:
    """SplitMix64 in whole numbers of Python: the noise of the places [start, end) of a row, which are a text."""
    mask = (1 << 64) - 1

    def unit(at: int) -> float:
        z = ((at + 1) * 0x9E3779B97F4A7C15 + key) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52

    values = [[2 * unit(place * features + c) - 1 for c in range(features)] for place in range(start, end)]
    return ALPHA / math.sqrt((end - start) * features) * torch.tensor(values, dtype=torch.float64)


def trained(pairs: list[tuple[str, bool, str]]):
    """Losses and first gradients of layouts, one after the other."""
    return [steps_of(*pair) for pair in pairs]


def steps_of(name: str, of_documents: bool, layout: str):
    case = replace(LAYOUTS[layout], documents=of_documents)
    config = run_config(case, "fp64", STEPS)
    config = replace(config, model=replace(config.model, neftune_alpha=ALPHA))
    session = apply(config, workload(config, model_config(name)), device=torch.device("cpu"))
    ranks = (index(session.mesh, DATA_AXES), degree(session.mesh, DATA_AXES))
    batches = Batches(noisy(of_documents), BATCH, config.train.microbatch_size, *ranks, seed=None)
    losses, first = [], {}
    for step in range(STEPS):
        total = total_of(step, of_documents)
        loss = session.step(batches.at(step * BATCH), total=total).clone()
        if step == 0:
            first = {name: value.clone() for name, value in full(gradients_of(session)).items()}
        session.update(rate(step), float(session.norm()))
        all_reduce(loss, group(session.mesh, ("dp_replicate", "dp_shard")))
        losses.append(float(loss))
    return (losses, first) if dist.get_rank() == 0 else losses


@pytest.mark.parametrize("world", [1, 2])
def test_every_layout_has_the_noise_of_a_plain_loop(world):
    layouts = [name for name, case in LAYOUTS.items() if case.world == world]
    pairs = [(*pair, layout) for layout in layouts for pair in PAIRS]
    for (name, rows, layout), (losses, gradients) in zip(
        pairs, run_ranks(world, trained, pairs, timeout=400)[0], strict=True
    ):
        exact = 1e-6 if "compiled" in layout else 1e-9
        assert losses == pytest.approx(plain(name, rows)[0], rel=exact), (name, layout, rows)
        assert_same_as_one_device(gradients, plain(name, rows)[1], tolerance=max(exact, 1e-8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_distribution_is_that_of_transformers(dtype):
    """Both draws of rows of one text: bounds, moments, and the share below every tenth of the range."""
    rows, length, features = 4, 32, 512
    embedding = nn.Embedding(9, features, dtype=dtype)
    embedding.neftune_noise_alpha = ALPHA
    plain_output = embedding(torch.zeros(rows, length, dtype=torch.int64))
    torch.manual_seed(0)
    theirs = neftune_post_forward_hook(embedding, None, torch.zeros_like(plain_output))
    keys = torch.arange(rows)
    ours = noise(ALPHA, keys, None, plain_output)
    assert ours.dtype == dtype and torch.equal(ours, noise(ALPHA, keys, None, plain_output))
    bound = ALPHA / math.sqrt(length * features)
    for drawn in (theirs.double(), ours.double()):
        assert drawn.abs().max() <= bound * (1 + 2**-8)
        assert drawn.mean().abs() < 0.01 * bound
        assert drawn.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)
        shares = [(drawn < bound * (tenth / 5 - 1)).double().mean() for tenth in range(1, 10)]
        assert shares == pytest.approx([tenth / 10 for tenth in range(1, 10)], abs=0.01)
    assert not torch.equal(ours[0], ours[1])
    assert torch.equal(ours[2:3], noise(ALPHA, keys[2:3], None, plain_output[2:3]))


def test_a_document_of_a_row_has_the_magnitude_that_it_has_alone():
    """transformers 34659: one length for a packed row gives short documents too little noise, as here row 0 has."""
    starts = torch.tensor([[0, 4, 64, 64], [0, 1, 20, 64], [0, 64, 64, 64]], dtype=torch.int32)
    assert lengths_at(starts, 3, 64, torch.device("cpu"))[:, [0, 3, 4, 63]].tolist() == [
        [4, 4, 60, 60], [1, 19, 19, 44], [64, 64, 64, 64]
    ]  # fmt: skip
    like, keys = torch.zeros(3, 64, 256), torch.arange(3)
    drawn, whole = noise(ALPHA, keys, starts, like), noise(ALPHA, keys, None, like)
    torch.testing.assert_close(drawn[0, :4], whole[0, :4] * 4)  # sqrt(64 / 4)
    torch.testing.assert_close(drawn[2], whole[2])


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama", "gpt2", "opt"])
def test_the_place_is_that_of_transformers(model_type):
    """The same hook of transformers, drawing the same numbers, gives the same logits; none in evaluation."""
    from transformers.integrations.neftune import activate_neftune

    model = causal_model(model_config(model_type)).train()
    ids, keys = torch.randint(90, (2, 8)), torch.tensor([3, 4])
    quiet = model(input_ids=ids, use_cache=False).logits.detach()
    embedding = embedding_of(model, model_type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", lambda like, *_: noise(ALPHA, keys, None, like))
        removed = activate_neftune(model, ALPHA)
        theirs = model(input_ids=ids, use_cache=False).logits.detach()
        removed.remove()
    EmbeddingNoise(ALPHA).attach(model, embedding)
    ours = model(input_ids=ids, use_cache=False, **{KEYS: keys}).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours, quiet)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, quiet, rtol=0, atol=0)
    model.eval()
    calm = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(model(input_ids=ids, use_cache=False, **{KEYS: keys}).logits, calm)


def test_noise_is_of_training_data_and_of_each_epoch():
    once, again = (
        int(noisy(False).rows(np.array([3]), np.array([place]))[KEYS]) for place in (3, 3 + STEPS * BATCH)
    )
    assert once != again
    assert noisy(False).size == STEPS * BATCH


def test_what_can_have_no_noise_is_refused():
    config = run_config(Case(tensor=4, mode="2d"), "fp32")
    with pytest.raises(ConfigError, match="neftune_alpha"):
        check_settings(replace(config, model=replace(config.model, neftune_alpha=5.0)))
    with pytest.raises(ConfigError, match="no table of embeddings"):
        embedding_of(nn.Linear(2, 2), "a model")
    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding)
    EmbeddingNoise(1.0).attach(model, embedding)
    model.forward = lambda ids: embedding(ids)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="no rows of tokens"):
        model(ids=torch.zeros(5, 2, dtype=torch.int64), **{KEYS: torch.zeros(3, dtype=torch.int64)})
    assert model(ids=torch.zeros(5, 2, dtype=torch.int64)).shape == (5, 2, 4)
