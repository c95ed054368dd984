"""Adapters (LoRA): training on any layout equals a plain loop over peft's; what is exported, averaged and refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from cai_apps import recipes
from cai_apps.applications.diffusion.data.samples import Images
from cai_apps.applications.diffusion.model.denoiser import check_shared
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.flops import image_flops
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.lora import FILE
from cai_apps.compose.materialize import materialize
from cai_apps.compose.workload import on_meta
from cai_apps.config.sections import LoRA
from cai_apps.data.batches import Batches
from cai_apps.run.task import Job
from cai_apps.run.train import train
from cai_mesh import checkpoint
from cai_mesh.comm import all_reduce, group
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.testing import run_ranks

STEPS, BATCH, LR = 3, 8, 0.01
CHANGES = {
    "model.weights": "pretrained",
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.microbatch_size": 2,
    "train.device": "cpu",
    "precision.compute": "fp64",
    "data.encoder_dtype": "fp64",
    "data.samples": 40,
    "data.validation_fraction": 0.0,
    "train.validate_every": 0,
    "lora.rank": 3,
    "lora.alpha": 6,
    "optimizer.lr": LR,
    "optimizer.ema_decay": 0.9,
    "sampling.prompts": [],
}
LAYOUTS = {
    "1 rank": (1, 1, "device", 1),
    "1 rank, on the host": (1, 1, "host", 1),
    "2 ranks": (2, 3, "device", 1),
    "4 ranks": (4, 2, "device", 1),
    "2 ranks that share layers": (1, 1, "device", 2),
}
"""Data ranks, ZeRO stage, residency, tensor-parallel ranks."""
BASES = ("sd-v1-tiny", "sd-v2-tiny", "dit-tiny", "sd3-tiny")


def config_of(base: Path, recipe: str, ranks: int = 1, zero: int = 1, **more: Any) -> Any:
    places = {"model.name": str(base / recipe), "data.cache": str(base / "cache")}
    layout = {"parallel.shard": ranks, "parallel.zero": zero}
    changes = CHANGES | places | layout | more
    return DIFFUSION.resolve(recipes.load(recipe, changes), ranks * changes.get("parallel.tensor.size", 1))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Pretrained models: exports, with no weight left at zero."""
    directory = tmp_path_factory.mktemp("base")
    for recipe in BASES:
        run_ranks(
            1, untrained, recipe, str(directory / "cache"), str(directory / f"run-{recipe}"), timeout=240
        )
        shutil.copytree(directory / f"run-{recipe}" / "export", directory / recipe)
        for part in ("unet", "transformer", "text_encoder", "text_encoder_2"):
            for file in (directory / recipe / part).glob("*.safetensors"):
                save_file(noisy(load_file(file)), file, metadata={"format": "pt"})
    return directory


def untrained(recipe: str, cache: str, directory: str) -> None:
    """Export a recipe's model as it begins."""
    changes = {
        "data.samples": 20,
        "data.cache": cache,
        "parallel.shard": 1,
        "optimizer.ema_decay": None,
        "sampling.prompts": [],
        "train.device": "cpu",
    }
    exported(DIFFUSION.resolve(recipes.load(recipe, changes), 1), directory)


def exported(config: Any, directory: str, session: Any = None) -> None:
    """Write what a session ends with, or what it would begin with."""
    work = workload(config, load_design(config.model.name), torch.device("cpu"))
    session = session or apply(config, work, device=torch.device("cpu"))
    job = Job(DIFFUSION, config, Path(directory), DIFFUSION.prepare(config), "cpu")
    if dist.get_rank() == 0:
        Path(directory).mkdir(exist_ok=True)
        DIFFUSION.fill(job)
    DIFFUSION.export(session, job)


def noisy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With some noise everywhere, the same where weights are the same."""
    found = {}
    for name, value in weights.items():
        torch.manual_seed(int(value.double().abs().sum() * 1000) % 1000)
        found[name] = value + 0.05 * torch.randn_like(value)
    return found


def images_of(config: Any) -> Images:
    prepared = DIFFUSION.prepare(config)
    return Images(prepared, 0, prepared.images, config.objective.condition_dropout, config.train.seed)


def trained(base: Path, recipe: str, ranks: int, zero: int, residency: str, directory: str, more: dict):
    """The losses; it exports into `directory`."""
    config = config_of(base, recipe, ranks, zero, **{"memory.residency": residency}, **more)
    design = load_design(config.model.name)
    session = apply(config, workload(config, design, torch.device("cpu")), device=torch.device("cpu"))
    data = group(session.mesh, ("dp_replicate", "dp_shard"))
    batches = Batches(
        images_of(config), BATCH, 2, 0 if data is None else dist.get_rank(data), ranks, config.train.seed
    )
    losses = []
    for step in range(STEPS):
        loss = session.step(batches.at(step * BATCH), total=BATCH).clone()
        session.update(LR, float(session.norm()))
        all_reduce(loss, data)
        losses.append(float(loss))
    assert session.average is not None
    assert all(".lora_" in name for name in session.average.values())
    exported(config, directory, session)
    return losses


def twin(base: Path):
    """A plain loop over the parts of diffusers and transformers with adapters by peft, and torch's AdamW."""
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import CLIPTextModel

    config = config_of(base, "sd-v1-tiny", **{"model.text_encoder": "trained"})
    work = workload(config, load_design(config.model.name), torch.device("cpu"))
    unet = UNet2DConditionModel.from_pretrained(base / "sd-v1-tiny" / "unet").double()
    unet.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    text = CLIPTextModel.from_pretrained(base / "sd-v1-tiny" / "text_encoder").double()
    options = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "out_proj"])
    inject_adapter_in_model(options, text)
    parts = {"denoiser": unet, "texts.0": text}
    adapters = {
        f"{part}.{name}": param
        for part, model in parts.items()
        for name, param in model.named_parameters()
        if ".lora_" in name
    }
    for name, value in started(config, work).items():
        adapters[name].data.copy_(value)
    options = {"lr": LR, "betas": (0.9, config.optimizer.beta2), "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(adapters.values(), **options)
    batches = Batches(images_of(config), BATCH, BATCH, 0, 1, config.train.seed)
    losses, averages = [], {name: value.detach().clone() for name, value in adapters.items()}
    for step in range(STEPS):
        batch = work.ready(batches.at(step * BATCH)[0])
        states = text(batch["tokens"][:, 0]).last_hidden_state
        said = unet(batch["noisy"], batch["time"], encoder_hidden_states=states).sample
        loss = (batch["weight"] * (said - batch["target"]).square().mean((1, 2, 3))).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(adapters.values(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        decay = min(0.9, (2 + step) / (11 + step))
        for name, value in adapters.items():
            averages[name].mul_(decay).add_(value.detach(), alpha=1 - decay)
    return losses, averages


def started(config: Any, work: Any) -> dict[str, torch.Tensor]:
    """The adapters that a run of this config begins with."""
    model, device = on_meta(work), torch.device("cpu")
    options: dict[str, Any] = {"seed": config.train.seed, "dtype": torch.float64, "device": device}
    materialize(model, work.initializer, **options, pretrained=True)
    found = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    assert found and all(value.any() == (".lora_A." in name) for name, value in found.items())
    return found


@pytest.fixture(scope="module")
def expected(base):
    return twin(base)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_equals_a_plain_loop_over_peft(layout, base, expected, tmp_path):
    ranks, zero, residency, tensor = LAYOUTS[layout]
    losses, averages = expected
    more = {"model.text_encoder": "trained", "parallel.tensor.size": tensor}
    job = (base, "sd-v1-tiny", ranks, zero, residency, str(tmp_path), more)
    found = run_ranks(ranks * tensor, trained, *job, timeout=240)[0]
    assert found == pytest.approx(losses, abs=1e-9)
    assert losses[-1] != losses[0]
    written = load_file(tmp_path / "export" / "lora" / FILE)
    assert written.keys() == {file_key(name) for name in averages}
    for name, value in averages.items():
        scaled = (
            value * 2 if ".lora_B." in name else value
        )  # alpha / rank is in B, for tools that know no alpha
        torch.testing.assert_close(written[file_key(name)].double(), scaled, rtol=1e-7, atol=1e-8, msg=name)


def test_adapters_stand_beside_layers_in_fp8(base, expected, tmp_path):
    more = {"model.text_encoder": "trained", "precision.linear": "fp8", "precision.compute": "fp32"}
    found = run_ranks(1, trained, base, "sd-v1-tiny", 1, 1, "device", str(tmp_path), more, timeout=240)[0]
    assert found == pytest.approx(expected[0], rel=0.02)
    assert found != pytest.approx(expected[0], rel=1e-5), "no product was in FP8"


def file_key(name: str) -> str:
    """What files on the hub call a parameter of an adapter, as other tools read it."""
    for prefix, part in {"denoiser.": "unet.", "texts.0.": "text_encoder.text_model."}.items():
        name = name.replace(prefix, part) if name.startswith(prefix) else name
    return name.replace(".default.", ".")


PROMPTS = ["a large red circle", "a small blue square"]


def fused_by_diffusers(base: Path, recipe: str, export: Path, home: Path) -> Path:
    """A copy of the base in `home` with the adapters of an export in its weights."""
    from diffusers import DiffusionPipeline, SD3Transformer2DModel

    if recipe == "sd-v2-tiny":
        pipeline = DiffusionPipeline.from_pretrained(base / recipe)
        pipeline.load_lora_weights(export / "lora")
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        pipeline.save_pretrained(home)
        return home
    shutil.copytree(base / recipe, home)
    model = SD3Transformer2DModel.from_pretrained(home / "transformer")
    model.load_lora_adapter(export / "lora", prefix="transformer", weight_name=FILE)
    model.fuse_lora()
    model.unload_lora()
    model.save_pretrained(home / "transformer")
    return home


@pytest.mark.parametrize("recipe", ["sd-v2-tiny", "sd3-tiny"])
def test_the_export_draws_what_the_base_with_the_adapters_draws(recipe, base, tmp_path):
    more = {"model.text_encoder": "frozen", "lora.dropout": 0.1, "lora.rank_stabilized": recipe == "sd3-tiny"}
    run_ranks(1, trained, base, recipe, 1, 1, "device", str(tmp_path), more, timeout=240)
    export = tmp_path / "export"
    adapted = fused_by_diffusers(base, recipe, export, tmp_path / "adapted")
    for part in ("unet", "transformer", "text_encoder"):
        for file in (export / part).glob("*.safetensors"):
            fused, own = load_file(adapted / part / file.name), load_file(file)
            before = load_file(base / recipe / part / file.name)
            assert fused.keys() == own.keys() == before.keys()
            changed = any(not torch.equal(own[name], before[name]) for name in own)
            assert changed == (part != "text_encoder")
            for name, value in own.items():
                torch.testing.assert_close(value, fused[name], rtol=1e-5, atol=1e-6, msg=name)
    drawn = [
        Sampler(directory, device="cpu", dtype=torch.float32).pictures(PROMPTS, Options(steps=2)).astype(int)
        for directory in (export, adapted, base / recipe)
    ]
    assert np.abs(drawn[0] - drawn[1]).max() <= 1
    assert np.abs(drawn[0] - drawn[2]).max() > 1


def test_adapters_of_text_encoders_are_those_that_diffusers_reads(base, tmp_path):
    from diffusers import DiffusionPipeline

    more = {"model.text_encoder": "trained"}
    run_ranks(1, trained, base, "sd-v2-tiny", 1, 1, "device", str(tmp_path), more, timeout=240)
    export = tmp_path / "export"
    pipeline = DiffusionPipeline.from_pretrained(base / "sd-v2-tiny")
    pipeline.load_lora_weights(export / "lora")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    fused = dict(pipeline.text_encoder.named_parameters())
    own = dict(type(pipeline.text_encoder).from_pretrained(export / "text_encoder").named_parameters())
    before = dict(
        type(pipeline.text_encoder).from_pretrained(base / "sd-v2-tiny/text_encoder").named_parameters()
    )
    assert fused.keys() == own.keys()
    assert any(not torch.equal(own[name], before[name]) for name in own)
    for name, value in own.items():
        torch.testing.assert_close(value, fused[name], rtol=1e-5, atol=1e-6, msg=name)


def test_labels_and_convolutions_have_adapters_too(base, tmp_path):
    more = {"lora.targets": ["ff.net.2", "pos_embed.proj"]}
    run_ranks(2, trained, base, "dit-tiny", 2, 3, "device", str(tmp_path), more, timeout=240)
    written = load_file(tmp_path / "export" / "lora" / FILE)
    before = load_file(base / "dit-tiny" / "transformer" / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(("ff.net.2.weight", "pos_embed.proj.weight"))}
    stem = "transformer.pos_embed.proj.lora_"
    added = torch.einsum("or,rikl->oikl", written[f"{stem}B.weight"][:, :, 0, 0], written[f"{stem}A.weight"])
    torch.testing.assert_close(
        after["pos_embed.proj.weight"], before["pos_embed.proj.weight"] + added, rtol=1e-5, atol=1e-6
    )


def test_a_dit_whose_blocks_have_their_own_embeddings_is_refused(base, tmp_path):
    shutil.copytree(base / "dit-tiny", tmp_path / "dit-tiny")
    file = tmp_path / "dit-tiny" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.bias"][0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="embeddings that differ"):
        check_shared(file.parent)


def changed_base(base: Path, target: Path) -> Path:
    """A copy of a pipeline with another number in its UNet."""
    shutil.copytree(base / "sd-v1-tiny", target)
    file = target / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["conv_in.bias"][0] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    return target


def test_resumes_on_another_layout(base, tmp_path):
    def run(name: str, steps: int, ranks: int, zero: int, **others: Any) -> dict[str, torch.Tensor]:
        more = {"train.steps": steps, "lr_schedule.decay_steps": 4, "log.directory": str(tmp_path / name)}
        config = config_of(base, "sd-v1-tiny", ranks, zero, **more, **others)
        return load_file(train(DIFFUSION, config, label="lora").export / "lora" / FILE)

    whole = run("whole", 4, 1, 1)
    run("parts", 2, 2, 3)
    names = checkpoint.contents(tmp_path / "parts" / "checkpoints").tensors
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "average"}
    assert all(".lora_" in name for name in names)
    shutil.copytree(tmp_path / "parts", tmp_path / "beside-another")
    other = changed_base(base, tmp_path / "base")
    with pytest.raises(CheckpointError, match="beside another base"):
        run("beside-another", 4, 1, 0, **{"model.name": str(other)})
    for name, value in run("parts", 4, 1, 0).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7, msg=name)


def test_flops_are_those_of_one_backward_product(base):
    config = config_of(base, "sd-v1-tiny")
    plain = replace(config, lora=LoRA())
    design = load_design(config.model.name)
    assert 2 / 3 < image_flops(config, design) / image_flops(plain, design) < 0.75


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora.targets": ["to_qq"]}, "did you mean 'to_q'"),
        ({"lora.targets": ["attn1"]}, "is a Attention"),
        ({"lora.rank": -1}, "lora.rank"),
        ({"lora.alpha": 0}, "lora.alpha"),
        ({"lora.dropout": 1.0}, "lora.dropout is too large"),
        ({"lora.rank": 0}, "lora.rank is 0"),
        ({"model.weights": "random"}, "random weights"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(base, more, words):
    with pytest.raises(ConfigError, match=words):
        config_of(base, "sd-v1-tiny", **more)


def test_inputs_are_not_dropped_on_tensor_parallel_ranks(base):
    more = {"parallel.tensor.size": 2, "parallel.shard": 1, "lora.dropout": 0.1}
    config = recipes.load("sd-v1-tiny", CHANGES | {"model.name": str(base / "sd-v1-tiny")} | more)
    with pytest.raises(ConfigError, match="drop inputs"):
        DIFFUSION.resolve(config, 2)
