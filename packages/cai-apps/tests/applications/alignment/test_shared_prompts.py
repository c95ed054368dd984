"""Prompts that are computed once give the losses and gradients of those that are computed for each answer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from preference_toys import UNITS, config_of, initial, preferences
from transformers import AutoConfig

from cai_apps.applications.alignment.objective import Objective
from cai_apps.applications.alignment.scores import Scorer
from cai_apps.applications.alignment.shared_prompts import flops_of, saved_line
from cai_apps.applications.alignment.workload import INPUTS
from cai_apps.compose.documents import check_reads_prefixes, document_rule
from cai_apps.compose.losses import NextTokenLoss
from cai_apps.compose.models import meta_model
from cai_apps.data.preference.rows import PreferenceRows
from cai_mesh.attention import masked_attention, route_attention
from cai_mesh.errors import ConfigError
from cai_tensor_parallel import ShardedLogits

LENGTH = 24
MODELS = ("llama", "qwen3", "gemma3_text", "mistral", "gpt2", "gpt_oss")
"""Two of them with windows of three and four tokens, the last with a table of positions."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return preferences(tmp_path_factory.mktemp("shared") / "pairs", "pairs")


def rows_of(source, *, shares: bool, score: str = "sum") -> PreferenceRows:
    reference = np.random.default_rng(3).normal(-9.0 if score == "sum" else -3.0, 1.0, 2 * UNITS)
    rows = PreferenceRows.of(source, np.arange(UNITS), LENGTH, shares_prompts=shares)
    return PreferenceRows(rows.source, LENGTH, rows.order, rows.rows_at, reference, rows.shared)


def wide_norms(model: torch.nn.Module) -> None:
    """Let norms compute in the dtype of what they get: those of transformers round to float32."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            eps, more = (
                getattr(module, "variance_epsilon", getattr(module, "eps", None)),
                float("Gemma" in kind),
            )
            module.forward = partial(norm, module, eps, more)


def norm(module: torch.nn.Module, eps: float, more: float, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (module.weight + more)


def learned(source, algorithm: str, name: str, dtype: torch.dtype, *, shares: bool, rule=document_rule):
    """The loss of all pairs, what is measured, and all gradients."""
    model = initial(algorithm, name, dtype)
    route_attention(model, rule)
    wide_norms(model)
    options = config_of(algorithm).alignment
    score = {"reward": "value", "dpo": "sum"}.get(algorithm, "mean")
    objective = Objective(options, Scorer(NextTokenLoss(ShardedLogits()), score, shares))
    rows = rows_of(source, shares=shares, score=score)
    batch = rows.rows(np.arange(rows.size), np.arange(rows.size))
    output = model(use_cache=False, **{key: batch[key] for key in INPUTS if key in batch})
    loss, measures = objective.measured(output, batch)
    (loss / UNITS).backward()
    tokens = int((batch["cu_seqlens"][:, -2]).sum())
    return loss.detach() / UNITS, measures, {n: p.grad for n, p in model.named_parameters()}, tokens


def assert_alike(one, other, exact: float) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=exact, atol=0)
    torch.testing.assert_close(one[1][0] / one[1][1], other[1][0] / other[1][1], rtol=10 * exact, atol=exact)
    largest = max(float(g.abs().max()) for g in other[2].values())
    for name, gradient in other[2].items():
        assert float((one[2][name] - gradient).abs().max()) <= exact * largest, name


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_is_computed_once_changes_no_gradient(source, name):
    once, twice = (learned(source, "dpo", name, torch.float64, shares=shares) for shares in (True, False))
    assert_alike(once, twice, 1e-10)
    assert once[3] < twice[3]


@pytest.mark.parametrize("algorithm", ["simpo", "orpo", "ipo", "reward"])
def test_of_every_algorithm_of_pairs(source, algorithm):
    once, twice = (
        learned(source, algorithm, "llama", torch.float64, shares=shares) for shares in (True, False)
    )
    assert_alike(once, twice, 1e-10)


def test_in_float32_and_by_the_plain_rule(source):
    once, plain, twice = (
        learned(source, "dpo", "llama", torch.float32, shares=shares, rule=rule)
        for shares, rule in ((True, document_rule), (True, masked_attention), (False, document_rule))
    )
    assert_alike(once, twice, 1e-5)
    assert_alike(plain, twice, 1e-5)


def test_what_is_saved_is_said_and_not_counted(source):
    """FLOPs of a prompt and two answers that go on from it: those of two documents, less those of the prompt."""
    rows = [rows_of(source, shares=shares) for shares in (True, False)]
    shared, whole = ([r.rows(np.array([n]), np.zeros(1)) for n in range(r.size)] for r in rows)
    once = int(rows[0].shared.sum())
    every = int(source.documents.lengths().sum())
    assert f"{once / every:.1%} of the tokens less" in saved_line(rows[0]) and saved_line(rows[1]) == ""

    def squares(lengths):
        return float((lengths.astype(float) ** 2).sum())

    def filled(batch, documents):
        return float(LENGTH - batch["cu_seqlens"][0, documents * int(batch["present"].sum())]) ** 2

    prompts = squares(rows[0].shared)
    fill = [sum(filled(b, n) for b in batches) for batches, n in ((shared, 3), (whole, 2))]
    found = [sum(flops_of(squares, b) for b in batches) for batches in (shared, whole)]
    assert found[0] - fill[0] == pytest.approx(found[1] - fill[1] - prompts)


@pytest.mark.parametrize("name", ["mamba", "jamba", "bloom", "llama4_text"])
def test_models_that_cannot_go_on_from_a_prompt_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"{name}(.|\n)*share_prompts"):
        check_reads_prefixes(meta_model(AutoConfig.for_model(name)), name)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "gpt_oss"])
def test_models_that_can(name):
    check_reads_prefixes(meta_model(AutoConfig.for_model(name)), name)
