"""Each tiny recipe on one, two and four ranks equals a plain loop over diffusers' model, scheduler and torch's AdamW.

Ranks share data, tensors or both. Losses, every first gradient, every weight and every average after three steps; and
the pictures of what was exported.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import full
from torch import nn
from torch.distributions import Normal, kl_divergence

from cai_apps import recipes
from cai_apps.applications.diffusion.data.samples import Images, split
from cai_apps.applications.diffusion.model.denoiser import build, initializer
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.model.encoders import load_autoencoder
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.data.batches import Batches
from cai_apps.run.task import Job
from cai_mesh import rng
from cai_mesh.comm import all_reduce, group
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.testing import assert_same_as_one_device, run_ranks

RECIPES = ("sd-v1-tiny", "sd-v2-tiny", "dit-tiny", "sd3-tiny")
STEPS, BATCH, DECAY = 3, 8, 0.9
CHANGES = {
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.microbatch_size": 2,
    "train.device": "cpu",
    "precision.compute": "fp64",
    "data.encoder_dtype": "fp64",
    "data.samples": 40,
    "optimizer.ema_decay": DECAY,
    "objective.offset_noise": 0.1,
    "objective.condition_dropout": 0.3,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "2": {"shard": 2, "zero": 3},
    "4": {"shard": 4, "zero": 2},
    "2-compiled": {"shard": 2, "zero": 3, "train.compile": "on"},
    "tensor2": {"tensor": 2},
    "tensor2-data2": {"shard": 2, "zero": 3, "tensor": 2},
    "tensor4": {"tensor": 4},
    "tensor2-full": {"tensor": 2, "memory.recompute": "full"},
    "tensor2-selective": {"tensor": 2, "memory.recompute": "selective"},
    "tensor2-host": {"shard": 2, "zero": 3, "tensor": 2, "memory.residency": "host"},
}
"""Ranks that share data and a ZeRO stage, tensor-parallel ranks (over four, two heads do not go round), and more."""
GRAPHS = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
"""Graphs that are divided as they are for a GPU; their operators compute as ever, in float64."""
RUNS = [(recipe, layout) for layout in ("1", "2", "tensor2") for recipe in RECIPES] + [
    ("dit-tiny", "4"),
    ("sd-v1-tiny", "2-compiled"),
    ("sd3-tiny", "tensor2-data2"),
    ("dit-tiny", "tensor2-data2"),
    ("dit-tiny", "tensor2-selective"),
    ("dit-tiny", "tensor2-host"),
]
IN_THE_MATRIX = [
    *((recipe, "4") for recipe in RECIPES if recipe != "dit-tiny"),
    ("sd-v2-tiny", "tensor4"),
    ("sd3-tiny", "tensor2-full"),
]


def config_of(recipe: str, cache: str, shard: int = 1, zero: int = 1, tensor: int = 1, **more: Any) -> Any:
    layout = {
        "parallel.shard": shard,
        "parallel.zero": zero,
        "parallel.tensor.size": tensor,
        "data.cache": cache,
    }
    if recipe == "sd-v2-tiny":  # the seed's images are enough for four ranks
        layout["data.validation_fraction"] = 0.9
    return DIFFUSION.resolve(recipes.load(recipe, CHANGES | layout | more), shard * tensor)


def images_of(config: Any) -> Images:
    prepared = DIFFUSION.prepare(config)
    whole = Images(prepared, 0, prepared.images, config.objective.condition_dropout, config.train.seed)
    return split(whole, config.data.validation_fraction)[0]


def trained(recipe: str, cache: str, layout: str, directory: str):
    """What every rank returns: losses, first gradients, weights and averages; it exports into `directory`."""
    config = config_of(recipe, cache, **LAYOUTS[layout])
    design = load_design(config.model.name)
    with mock.patch.object(torch, "compile", GRAPHS):
        session = apply(config, workload(config, design, torch.device("cpu")), device=torch.device("cpu"))
    data = group(session.mesh, ("dp_replicate", "dp_shard"))
    rank = 0 if data is None else dist.get_rank(data)
    batches = Batches(images_of(config), BATCH, 2, rank, config.parallel.shard, config.train.seed)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = session.step(batches.at(step * BATCH), total=BATCH).clone()
        session.weights.finish()
        if step == 0:
            gradients = full(gradients_of(session))
        session.update(config.optimizer.lr, float(session.norm()))
        all_reduce(loss, data)
        losses.append(float(loss))
    masters = session.weights.masters() or BoxedTensor.of_model(session.model)
    assert session.average is not None
    found = losses, gradients, full(masters), full(session.average.values())
    job = Job(DIFFUSION, config, Path(directory), DIFFUSION.prepare(config), "cpu")
    if dist.get_rank() == 0:
        DIFFUSION.fill(job)
    DIFFUSION.export(session, job)
    return found


def gradients_of(session: Any) -> dict[str, BoxedTensor]:
    if session.config.parallel.zero < 3:
        return session.weights.optimizer.gradients()
    named = session.model.named_parameters()
    return {canonical_name(n, p): BoxedTensor.like(p, p.grad) for n, p in named}


def twin(recipe: str, cache: str):
    """The plain loop."""
    config = config_of(recipe, cache)
    design = load_design(config.model.name)
    with torch.device("meta"):
        model = build(design, train_text=config.model.text_encoder == "trained")
    model = materialize(
        model, initializer(design), seed=config.train.seed, dtype=torch.float64, device=torch.device("cpu")
    )
    options = {"lr": config.optimizer.lr, "betas": (0.9, config.optimizer.beta2), "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    averages = {name: value.detach().clone() for name, value in model.named_parameters()}
    batches = Batches(images_of(config), BATCH, BATCH, 0, 1, config.train.seed)
    losses, first = [], {}
    for step in range(STEPS):
        loss = plain_loss(config, design, model, batches.at(step * BATCH)[0])
        loss.backward()
        if step == 0:
            first = {name: value.grad.clone() for name, value in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        decay = min(DECAY, (2 + step) / (11 + step))
        for name, value in model.named_parameters():
            averages[name].mul_(decay).add_(value.detach(), alpha=1 - decay)
    return losses, first, {name: value.detach() for name, value in model.named_parameters()}, averages


def drawn(config: Any, purpose: str, like: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers of each sample, as the run's seed and its position in the run say."""
    count = like[0].numel()
    rows = [
        rng.unit(rng.key(config.train.seed, purpose), int(p) * count + torch.arange(count)) for p in position
    ]
    return torch.special.ndtri(torch.stack(rows)).view(like.shape)


def plain_loss(config: Any, design: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean loss of a batch by diffusers' schedulers."""
    import diffusers

    autoencoder = load_autoencoder(design, seed=config.train.seed, dtype=torch.float64, device="cpu")
    if design.autoencoder is None:
        clean = nn.functional.pixel_unshuffle(batch["pixels"].float() / 127.5 - 1, design.fold).double()
    else:
        clean = batch["mean"] + batch["std"] * drawn(config, "posterior", batch["mean"], batch["position"])
        clean = clean * autoencoder.model.config.scaling_factor
    noise = drawn(config, "noise", clean, batch["position"])
    noise = noise + 0.1 * drawn(config, "offset", clean[:, :, :1, :1], batch["position"])
    scheduler = getattr(diffusers, design.scheduler["_class_name"]).from_config(dict(design.scheduler))
    condition = conditions(model, batch)
    if design.family.flow:
        sigma = torch.sigmoid(torch.special.ndtri(batch["u"]))
        sigma = 3 * sigma / (1 + 2 * sigma)
        time, sigma = (1000 * sigma).float(), ((1000 * sigma).float().double() / 1000).view(-1, 1, 1, 1)
        said = model.denoiser((1 - sigma) * clean + sigma * noise, timestep=time, **condition).sample
        return (said - (noise - clean)).square().mean()
    time = (1000 * batch["u"]).long()
    noisy = scheduler.add_noise(clean, noise, time)
    said = model.denoiser(noisy, timestep=time, **condition).sample
    if said.shape[1] == 2 * clean.shape[1]:
        said, v = said.chunk(2, 1)
        return (said - noise).square().mean() + bound(
            scheduler.alphas_cumprod.double(), said, v, clean, noisy, time
        )
    velocity = config.objective.prediction == "v"
    target = scheduler.get_velocity(clean, noise, time) if velocity else noise
    weight = torch.ones(len(time), dtype=torch.float64)
    if config.objective.min_snr is not None:
        kept = scheduler.alphas_cumprod.double()[time]
        ratio = kept / (1 - kept)
        weight = ratio.clamp(max=config.objective.min_snr) / ratio
    return (weight * (said - target).square().mean((1, 2, 3))).mean()


def conditions(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What diffusers' pipelines give their denoisers."""
    if "label" in batch:
        return {"class_labels": batch["label"]}
    if "text" in batch:
        return {"encoder_hidden_states": batch["text"]}
    texts = list(model.texts.values())
    if len(texts) == 1:
        return {"encoder_hidden_states": texts[0](batch["tokens"][:, 0]).last_hidden_state}
    found = [text(batch["tokens"][:, i], output_hidden_states=True) for i, text in enumerate(texts)]
    states = torch.cat([each.hidden_states[-2] for each in found], -1)
    states = nn.functional.pad(states, (0, model.denoiser.config.joint_attention_dim - states.shape[-1]))
    return {
        "encoder_hidden_states": torch.cat([states, states.new_zeros(len(states), 256, states.shape[-1])], 1),
        "pooled_projections": torch.cat([each.text_embeds for each in found], -1),
    }


def bound(kept, noise, v, clean, noisy, time) -> torch.Tensor:
    """The variational bound's part of a step, in bits a number, by torch's distributions, one sample at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(time)):
        t = int(time[row])
        now, before = kept[t], kept[t - 1] if t else torch.ones((), dtype=torch.float64)
        beta = 1 - now / before
        after = t or 1  # the last step adds no noise: it is given the variance of the one before
        least = (1 - kept[after] / kept[after - 1]) * (1 - kept[after - 1]) / (1 - kept[after])

        def mean(x, row=row, now=now, before=before, beta=beta):
            return (before.sqrt() * beta * x + (1 - beta).sqrt() * (1 - before) * noisy[row]) / (1 - now)

        told = (noisy[row] - (1 - now).sqrt() * noise[row].detach()) / now.sqrt()
        share = (v[row] + 1) / 2
        model = Normal(mean(told), torch.exp(0.5 * (share * beta.log() + (1 - share) * least.log())))
        if t:
            bits = kl_divergence(Normal(mean(clean[row]), least.sqrt()), model)
        else:
            x = clean[row]
            above = torch.where(x > 0.999, torch.ones_like(x), model.cdf(x + 1 / 255))
            bits = (
                -(above - torch.where(x < -0.999, torch.zeros_like(x), model.cdf(x - 1 / 255)))
                .clamp(1e-12)
                .log()
            )
        total = total + bits.mean() / math.log(2)
    return total / len(time)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@functools.cache
def expected(recipe: str, cache: str):
    return twin(recipe, cache)


@pytest.mark.parametrize(
    ("recipe", "layout"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.matrix) for run in IN_THE_MATRIX)]
)
def test_equals_the_plain_loop(recipe, layout, cache, tmp_path):
    losses, gradients, weights, averages = expected(recipe, cache)
    ranks = LAYOUTS[layout].get("shard", 1) * LAYOUTS[layout].get("tensor", 1)
    found = run_ranks(ranks, trained, recipe, cache, layout, str(tmp_path), timeout=240)[0]
    assert found[0] == pytest.approx(losses, abs=1e-9)
    assert_same_as_one_device(found[1], gradients, tolerance=1e-8)
    assert_same_as_one_device(found[2], weights, tolerance=1e-7)
    assert_same_as_one_device(found[3], averages, tolerance=1e-7)
    pictures = picture(tmp_path / "export", recipe)
    assert pictures.shape[1:] == (pictures.shape[1],) * 2 + (3,)
    assert np.array_equal(pictures, expected_pictures(recipe, cache, tmp_path)), (
        "another layout, other pictures"
    )


def picture(directory: Path, recipe: str) -> np.ndarray:
    """Two pictures of an export."""
    prompts = {"dit-tiny": ["3", "7"], "sd-v2-tiny": ["the digit three", "the digit seven"]}
    sampler = Sampler(directory, device="cpu", dtype=torch.float32)
    return sampler.pictures(prompts.get(recipe, ["a red circle", "a blue square"]), Options(steps=3))


_FIRST: dict[tuple[str, str], np.ndarray] = {}


def expected_pictures(recipe: str, cache: str, here: Path) -> np.ndarray:
    """Those of the first layout that was run."""
    return _FIRST.setdefault((recipe, cache), picture(here / "export", recipe))
