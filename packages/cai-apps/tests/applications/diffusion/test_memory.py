"""Sampling with little memory, beside the same pictures drawn with everything at hand."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_pipelines import CAPTIONS, PIPELINES, autoencoder, save
from torch import nn

from cai_apps.applications.diffusion.model import loading, quantization
from cai_apps.applications.diffusion.model.design import LABELS, load_design
from cai_apps.applications.diffusion.model.encoders import Autoencoder
from cai_apps.applications.diffusion.model.loading import Memory, decoding_of, load_denoiser, variant_of
from cai_apps.applications.diffusion.model.quantization import KINDS, dequantize, quantize, quantize_layers
from cai_apps.applications.diffusion.sampling import sampler as sampler_module
from cai_apps.applications.diffusion.sampling.picture_sizes import parse_size
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options, make_scheduler
from cai_apps.cli import main
from cai_gemini import HostModel
from cai_mesh.errors import ConfigError
from cai_mesh.files import index_name
from cai_mesh.testing import run_ranks

PROMPTS = {"sd": CAPTIONS, "sd3": CAPTIONS, "sd3-t5": CAPTIONS, "dit": ["3", "700", "999"]}
OPTIONS = Options(steps=3, seed=1)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pipelines")
    return {name: save(name, home / name) for name in PIPELINES}


def sampler_of(directory: Path, dtype: torch.dtype = torch.float32, **memory: Any) -> Sampler:
    return Sampler(directory, device="cpu", dtype=dtype, memory=Memory(**memory))


# -- 8 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_step(kind, dtype):
    torch.manual_seed(0)
    weight = torch.randn(6, 5, 3, 3) * torch.tensor([1.0, 1e-6, 1e4, 3.0, 1.0, 0.1]).view(-1, 1, 1, 1)
    weight[4] = 0
    weight = weight.to(dtype)
    values, scale = quantize(weight, kind)
    assert values.dtype == KINDS[kind][0] and values.shape == weight.shape and scale.shape == (6,)
    exact = values.double() * scale.double().view(-1, 1, 1, 1)
    step = scale.double().view(-1, 1, 1, 1).expand_as(exact)
    bound = step / 2 if kind == "int8" else torch.maximum(weight.double().abs() / 16, step / 1024)
    error = (exact - weight.double()).abs()
    assert (error <= bound * (1 + 1e-6)).all()
    assert (error > bound * 0.8).any(), "the bound is near"
    assert (error.amax((1, 2, 3)) == 0).tolist() == [False, False, False, False, True, False]
    rounded = dequantize(values, scale, dtype).double()
    assert ((rounded - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * (1 + 1e-6)).all(), "once"


@pytest.mark.parametrize("kind", list(KINDS))
def test_layers_compute_with_the_weights_they_hold(kind):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.Flatten(), nn.Linear(128, 5, bias=False)
    )
    plain = [m.weight.detach().clone() for m in (model[0], model[2])]
    size = sum(w.nbytes for w in plain)
    assert quantize_layers([("", model)], kind) == ["0", "2"]
    held = sum(b.nbytes for name, b in model.named_buffers() if "values" in name)
    assert held * 4 == size and [name for name, _ in model.named_parameters()] == ["0.bias"]
    x = torch.randn(3, 4, 8, 8)
    there = [dequantize(*quantize(w, kind), torch.float32) for w in plain]
    expected = nn.functional.conv2d(x, there[0], model[0].bias, 2, 1, groups=2).flatten(1) @ there[1].t()
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


def test_what_is_stored_in_8_bits_and_what_is_not(pipelines):
    for name, kept in (
        ("sd", {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}),
        ("dit", {"pos_embed.proj", "proj_out_1", "proj_out_2"}),
        ("sd3", {"pos_embed.proj", "proj_out", "norm_out.linear", "context_embedder"}),
    ):
        design = load_design(str(pipelines[name]))
        home = pipelines[name] / design.family.folder
        held = load_denoiser(design, home, device="cpu", dtype=torch.float32, memory=Memory("int8")).model
        as_before = {n for n, m in held.named_modules() if type(m) in (nn.Linear, nn.Conv2d)}
        assert kept <= as_before
        others = {n for n in as_before - kept if "embed" not in n}
        assert not others, "all layers inside blocks"
        assert all(t.dtype == torch.float32 for t in held.parameters())
        stored = [n for n, b in held.named_buffers() if n.endswith("values") and b.dtype == torch.int8]
        assert len(stored) > 15 and not any(".emb." in n for n in stored)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_cannot_be_stored(value):
    broken = nn.Linear(2, 2)
    broken.weight.data[0, 0] = value
    with pytest.raises(ConfigError, match=r"weight of block.0 is not finite"):
        quantize_layers([("block", nn.Sequential(broken))], "int8")
    with pytest.raises(ConfigError, match="no weights that fp8 could store"):
        quantize_layers([("block", nn.LayerNorm(3))], "fp8")


def of_several_shapes(dtype: torch.dtype) -> nn.Module:
    """Rows of small and of large weights, one of zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 33), nn.Conv2d(6, 12, 3), nn.Conv2d(8, 4, 1, groups=2)).to(dtype)
    for layer in model:
        layer.weight.data *= torch.logspace(-6, 3, len(layer.weight)).view(
            -1, *[1] * (layer.weight.dim() - 1)
        )
        layer.weight.data[1] = 0
    return model.requires_grad_(False)


class Away:
    """A tensor that can be used once it is back."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def to(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_device_quantizes_one_weight_at_a_time(monkeypatch, kind):
    """The device is one that holds no numbers; what it finds is put in by hand."""
    model = of_several_shapes(torch.bfloat16)
    weights = [layer.weight.clone() for layer in model]
    seen: list[torch.Tensor] = []

    def there(weight, kind):
        seen.append(weight)
        return [Away(found) for found in quantize(weights[len(seen) - 1], kind)]

    monkeypatch.setattr(quantization, "quantize", there)
    loading.settled(model, [*model.named_children()], "meta", Memory(kind))
    assert [(w.device.type, w.shape, w.dtype) for w in seen] == [
        ("meta", w.shape, torch.bfloat16) for w in weights
    ]
    for layer, weight in zip(model, weights, strict=True):
        values, scale = quantize(weight, kind)
        assert layer.values.device.type == layer.scale.device.type == "cpu"
        assert torch.equal(layer.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(layer.scale, scale)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_stored_is_the_formula_to_the_bit(kind, dtype):
    """Written out in numbers of 64 bits, each step rounded to 32; the weight itself is left alone."""
    low, most = KINDS[kind]
    for layer in of_several_shapes(dtype):
        before = layer.weight.clone()
        values, scale = quantize(layer.weight, kind)
        assert torch.equal(layer.weight, before)
        rows = before.flatten(1).double()
        largest = rows.abs().amax(1)
        expected = torch.where(largest > 0, (largest / most).float(), 1.0)
        assert torch.equal(scale, expected)
        shares = (rows / expected.double().view(-1, 1)).float().clamp(-most, most)
        shares = shares.round() if kind == "int8" else shares
        assert torch.equal(values.flatten(1).view(torch.uint8), shares.to(low).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_stores_the_same_bits(kind, dtype):
    here, there = of_several_shapes(dtype), of_several_shapes(dtype)
    here.append(nn.Linear(2048, 2048, dtype=dtype))
    there.append(nn.Linear(2048, 2048, dtype=dtype)).load_state_dict(here.state_dict())
    quantize_layers([("", here)], kind)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantize_layers([("", there)], kind, "cuda")
    assert torch.cuda.memory_allocated() == before
    most = 2048 * 2048 * (dtype.itemsize + 4 + 1)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * most, "one weight, in full, in 32 bits, in 8"
    for one, other in zip(here, there, strict=True):
        assert other.values.device.type == other.scale.device.type == "cpu"
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("name", list(PIPELINES))
@pytest.mark.parametrize(("kind", "near"), [("int8", 0.03), ("fp8", 0.2)])
def test_pictures_of_8_bit_weights_are_near(pipelines, name, kind, near):
    plain = sampler_of(pipelines[name]).latents(PROMPTS[name], OPTIONS)
    found = sampler_of(pipelines[name], weights=kind).latents(PROMPTS[name], OPTIONS)
    off = (found - plain).norm() / plain.norm()
    assert 0 < off < near
    again = sampler_of(pipelines[name], weights=kind, residency="host").latents(PROMPTS[name], OPTIONS)
    assert torch.equal(found, again)


# -- where parts are --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("name", list(PIPELINES))
def test_weights_on_the_host_draw_the_same_pictures(pipelines, name, guidance):
    options = Options(steps=3, seed=1, guidance=guidance)
    plain, away = sampler_of(pipelines[name]), sampler_of(pipelines[name], residency="host")
    expected = plain.pictures(PROMPTS[name], options)
    for _ in range(2):
        np.testing.assert_array_equal(away.pictures(PROMPTS[name], options), expected)
    for batch in (1, 3):
        batches = [s.in_batches(PROMPTS[name], options, batch=batch) for s in (plain, away)]
        np.testing.assert_array_equal(*batches)
    held = away._denoiser
    sizes = sorted(layer.nbytes for layer in held._layers.values())
    around = sum(place.home.nbytes for place in held._rest)
    assert held.most <= around + sum(sizes[-2:]) < around + sum(sizes)
    assert held.resident == 0


def test_one_part_is_on_the_device_at_a_time(pipelines, monkeypatch):
    there: list[str] = []
    seen: list[str] = []
    enter, leave = HostModel.__enter__, HostModel.__exit__

    def entered(self):
        there.append(type(self.model).__name__)
        seen.append("+".join(there))
        return enter(self)

    def left(self, *error):
        there.remove(type(self.model).__name__)
        return leave(self, *error)

    monkeypatch.setattr(HostModel, "__enter__", entered)
    monkeypatch.setattr(HostModel, "__exit__", left)
    sampler = sampler_of(pipelines["sd3"])
    for _ in range(2):
        sampler.in_batches(CAPTIONS, OPTIONS, batch=2)
        assert seen == [
            "CLIPTextModelWithProjection",
            "CLIPTextModelWithProjection",
            "SD3Transformer2DModel",
            "AutoencoderKL",
        ]
        seen.clear()


@pytest.mark.parametrize("how", [{}, {"weights": "int8", "residency": "host"}])
@pytest.mark.parametrize("name", list(PIPELINES))
def test_files_are_read_once(pipelines, tmp_path, monkeypatch, name, how):
    """The second batch is drawn where there is no file any more."""
    directory, read, kept = tmp_path / "pipeline", [], []
    shutil.copytree(pipelines[name], directory)
    prompts = ["cat", "700", "999"] if name == "dit" else CAPTIONS
    (directory / LABELS).write_text("dog\ncat\n", encoding="utf-8")
    for reader in ("load_text", "load_tokenizers", "label_names", "load_denoiser", "load_autoencoder"):
        original = getattr(sampler_module, reader)
        counted = lambda *a, o=original, r=reader, **k: (read.append(r), o(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(sampler_module, reader, counted)
    quantizing = loading.quantize_layers
    monkeypatch.setattr(loading, "quantize_layers", lambda *a: kept.append(quantizing(*a)))
    sampler = sampler_of(directory, **how)
    first = sampler.pictures(prompts, OPTIONS)
    texts = {"sd": 1, "dit": 0, "sd3": 2, "sd3-t5": 3}[name]
    beside = ["label_names"] if name == "dit" else ["load_tokenizers"]
    assert sorted(read) == sorted(["load_denoiser", "load_autoencoder", *["load_text"] * texts, *beside])
    assert len(kept) == (texts + 1 if how else 0)
    shutil.rmtree(directory)
    np.testing.assert_array_equal(sampler.in_batches(prompts, OPTIONS, batch=3), first)
    alone = sampler.in_batches(prompts, OPTIONS, batch=1)  # products of fewer rows may round otherwise
    np.testing.assert_allclose(alone.astype(int), first.astype(int), atol=1)
    assert len(read) == texts + 3 and len(kept) == (texts + 1 if how else 0)
    assert [held.resident for held in sampler._texts.values()] == [0] * texts
    assert not any(p.requires_grad for held in sampler._texts.values() for p in held.model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", [{}, {"weights": "int8"}, {"weights": "fp8", "residency": "host"}])
@pytest.mark.parametrize("name", ["sd", "sd3-t5"])
def test_nothing_stays_on_a_gpu(pipelines, name, how):
    sampler = Sampler(pipelines[name], device="cuda", dtype=torch.bfloat16, memory=Memory(**how))
    sampler.pictures(CAPTIONS, OPTIONS)
    left = torch.cuda.memory_allocated()
    sampler.pictures(CAPTIONS, OPTIONS)
    assert torch.cuda.memory_allocated() == left, "workspaces of libraries"
    for held in (*sampler._texts.values(), sampler._denoiser):
        assert {tensor.device.type for tensor in held.model.state_dict().values()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("scheduler", ["ddim", "dpm", "flow"])
@pytest.mark.parametrize("name", list(PIPELINES))
def test_recorded_steps_draw_the_same_pictures(pipelines, monkeypatch, name, scheduler, guidance):
    """Three batches, of which the second is of the first one's shapes; and again, with weights at other places.

    Both run the kernels of norms; only one is recorded.
    """
    if (scheduler == "flow") != name.startswith("sd3"):
        return
    options = Options(steps=5, seed=1, guidance=guidance, scheduler=scheduler)
    prompts, drawn = [*PROMPTS[name], *PROMPTS[name]][:5], []
    for graphed in (lambda forward: forward, sampler_module.Graphed):
        monkeypatch.setattr(sampler_module, "Graphed", graphed)
        sampler = Sampler(pipelines[name], device="cuda", dtype=torch.bfloat16)
        drawn += [sampler.in_batches(prompts, options, batch=2) for _ in range(2)]
    for again in drawn[1:]:
        np.testing.assert_array_equal(again, drawn[0])


@pytest.mark.parametrize("name", list(PIPELINES))
def test_norms_run_kernels_where_steps_are_recorded(pipelines, monkeypatch, name):
    """On a CPU the kernels are their plain torch forms, and nothing is recorded."""
    expected = sampler_of(pipelines[name]).pictures(PROMPTS[name], OPTIONS)
    monkeypatch.setattr(sampler_module, "Graphed", lambda forward: forward)
    sampler = sampler_of(pipelines[name])
    sampler._graphs = True
    for _ in range(2):
        found = sampler.pictures(PROMPTS[name], OPTIONS)
        np.testing.assert_allclose(found.astype(int), expected.astype(int), atol=1)
    kernels = {entry.kernel for entry in sampler._swapped.replaced}
    assert kernels == {"sd": {"group_norm", "layer_norm"}}.get(name, kernels)


def test_a_picture_that_was_interrupted(pipelines):
    sampler = sampler_of(pipelines["sd"], residency="host")
    expected = sampler.pictures(CAPTIONS, OPTIONS)
    middle = sampler._denoiser.model.mid_block

    def stop(*_):
        raise KeyboardInterrupt

    hook = middle.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        sampler.pictures(CAPTIONS, OPTIONS)
    hook.remove()
    assert sampler._denoiser.resident == 0
    np.testing.assert_array_equal(sampler.pictures(CAPTIONS, OPTIONS), expected)


def in_strips(directory):
    memory = {"weights": "int8", "residency": "host"}
    sampler = sampler_of(directory, torch.float64, **memory)
    alone = sampler.latents(CAPTIONS, OPTIONS)
    sampler.split(dist.group.WORLD)
    return alone, sampler.latents(CAPTIONS, OPTIONS)


@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_strips_of_8_bit_weights_on_the_host(pipelines, name):
    for alone, strips in run_ranks(2, in_strips, pipelines[name]):
        torch.testing.assert_close(strips, alone, rtol=1e-5, atol=1e-5)


# -- the autoencoder --------------------------------------------------------------------------------------------------


def decoder(pipelines, how: str, dtype: torch.dtype = torch.float32, **more: Any) -> Autoencoder:
    torch.manual_seed(0)
    model = autoencoder(**more).to(dtype).eval()
    return Autoencoder(load_design(str(pipelines["sd"])), model, how)  # type: ignore[arg-type]


def test_pictures_are_decoded_and_encoded_one_by_one(pipelines, monkeypatch):
    torch.manual_seed(1)
    latents = torch.randn(3, 4, 10, 14)
    sliced, whole = (decoder(pipelines, how).images(latents) for how in ("sliced", "whole"))
    alone = torch.cat([decoder(pipelines, "whole").images(latents[i : i + 1]) for i in range(3)])
    assert torch.equal(sliced, alone)
    assert (sliced.int() - whole.int()).abs().max() <= 1
    calls: list[int] = []
    found = decoder(pipelines, "auto")
    count = found.model.encoder.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    pixels = torch.randint(256, (3, 3, 20, 28), dtype=torch.uint8)
    expected = found.moments(pixels)
    monkeypatch.setattr("cai_apps.applications.diffusion.model.encoders.free_bytes", lambda device: 1)
    for name, value in found.moments(pixels).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    assert calls == [3, 1, 1, 1]
    count.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (17, 40), (37, 12), (45, 29)])
@pytest.mark.parametrize("sample_size", [32, 20])
def test_tiles_make_nearly_the_same_picture(pipelines, dtype, height, width, sample_size):
    torch.manual_seed(1)
    latents = torch.randn(2, 4, height, width)
    tiled = decoder(pipelines, "tiled", dtype, sample_size=sample_size).images(latents).int()
    whole = decoder(pipelines, "whole", dtype, sample_size=sample_size).images(latents).int()
    assert tiled.shape == whole.shape == (2, 3, 2 * height, 2 * width)
    off = (tiled - whole).abs().float()
    if height <= sample_size // 2 // 4 * 4 and width <= sample_size // 2 // 4 * 4:
        assert off.max() <= (1 if dtype == torch.float32 else 4)
    else:
        assert off.max() > 0 and off.mean() < 0.35 * whole.float().std()


def test_how_pictures_are_decoded_depends_on_what_is_free():
    config = {"block_out_channels": [128, 256, 512, 512]}
    each = 4 * 256 * 512 * 768 * 2
    size = (512, 768, 2)
    assert decoding_of(config, 8, *size, None) == "whole"
    for free, how in ((8 * each, "whole"), (8 * each - 1, "sliced"), (each, "sliced"), (each - 1, "tiled")):
        assert decoding_of(config, 8, *size, free) == how


def test_all_ways_to_decode_through_a_sampler(pipelines, monkeypatch):
    options = Options(size=(40, 56), steps=2)
    found = {
        how: sampler_of(pipelines["sd"], vae=how).pictures(CAPTIONS, options).astype(int)
        for how in loading.WAYS
    }
    assert np.abs(found["whole"] - found["sliced"]).max() <= 1
    np.testing.assert_array_equal(found["whole"], found["auto"])
    assert np.abs(found["whole"] - found["tiled"]).max() > 1
    monkeypatch.setattr("cai_apps.applications.diffusion.model.encoders.free_bytes", lambda device: 1)
    np.testing.assert_array_equal(sampler_of(pipelines["sd"]).pictures(CAPTIONS, options), found["tiled"])


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_a_picture_that_is_not_square_is_that_of_diffusers(pipelines, name):
    options = Options(size=(16, 24), steps=3)
    sampler = sampler_of(pipelines[name])
    found = sampler.pictures(CAPTIONS, options)
    assert found.shape == (3, 16, 24, 3)
    third: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3" else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(pipelines[name], **third)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_scheduler(load_design(str(pipelines[name])), options)
    expected = pipeline(
        CAPTIONS,
        height=16,
        width=24,
        num_inference_steps=3,
        guidance_scale=options.guidance,
        latents=sampler._noise(3, options, 0),
        output_type="np",
    ).images
    assert np.abs(found / 255 - expected).max() < 0.6 / 255 + 1e-3


def test_noise_of_a_square_is_what_it_was(pipelines):
    sampler = sampler_of(pipelines["sd"])
    one, two, none = (sampler._noise(2, Options(size=size), 5) for size in (16, (16, 16), None))
    assert torch.equal(one, two) and torch.equal(one, none)


def test_sizes_as_they_are_written():
    assert parse_size("512") == 512 and parse_size("512x768") == (512, 768)
    for text in ("", "x", "512x", "5.5", "512x768x3", "-8", "512*768"):
        with pytest.raises(ConfigError, match="no size"):
            parse_size(text)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"weights": "int8", "residency": "host"}])
def test_weights_in_shards_and_variants(pipelines, tmp_path, how):
    directory, parts = tmp_path / "shards", {"safety_checker": None}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(pipelines["sd"], **parts)
    pipeline.save_pretrained(directory, variant="bf16", max_shard_size="60KB")
    files = [f.name for f in (directory / "unet").glob("*.safetensors")]
    assert len(files) > 2 and all("bf16" in name for name in files)
    found = sampler_of(directory, **how).pictures(CAPTIONS, OPTIONS)
    np.testing.assert_array_equal(found, sampler_of(pipelines["sd"], **how).pictures(CAPTIONS, OPTIONS))


def test_folders_of_weights(tmp_path):
    names = {
        None: ("model.safetensors", "diffusion_pytorch_model-00001-of-00002.safetensors"),
        "bf16": ("model.bf16.safetensors", "diffusion_pytorch_model.bf16-00001-of-00002.safetensors"),
        "non_ema": ("diffusion_pytorch_model.non_ema.safetensors",),
    }
    for number, (variant, name) in enumerate((v, n) for v, found in names.items() for n in found):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ConfigError, match="no weights at"):
            variant_of(folder)
        save_file({"weight": torch.zeros(1)}, folder / name)
        if "-of-" in name:  # as published: nobody can read shards without their index
            with pytest.raises(ConfigError, match="no weights at"):
                variant_of(folder)
            index = {"metadata": {}, "weight_map": {"weight": name}}
            (folder / index_name("diffusion_pytorch_model", variant)).write_text(json.dumps(index))
        assert variant_of(folder) == variant
        save_file({"weight": torch.zeros(1)}, folder / "model.fp16.safetensors")
        if variant is None:
            assert variant_of(folder) is None
        else:
            with pytest.raises(ConfigError, match="several variants"):
                variant_of(folder)


# -- cai generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("sd", ["--size", "16x22"], "do not divide"),
        ("sd", ["--size", "16by20"], "no size of pictures"),
        ("sd3", ["--size", "16x68"], "64 pixels a side at most"),
        ("dit", ["--prompt", "3", "--size", "16x24"], "makes square pictures"),
        ("dit", ["--prompt", "1000"], "no label"),
        ("pixels", ["--vae", "tiled"], "works on pixels"),
        ("sd", ["--output", "pictures.doc"], "no kind of picture"),
        ("bare", ["--weights", "int8"], "no weights at"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_weights_are_read(
    pipelines, tmp_path, monkeypatch, capsys, name, arguments, words
):
    def never(*_, **__):
        raise AssertionError("weights were read")

    for reader in ("load_denoiser", "load_text", "load_autoencoder"):
        monkeypatch.setattr(sampler_module, reader, never)
    directory = tmp_path / name
    shutil.copytree(pipelines.get(name, pipelines["sd"]), directory)
    if name == "pixels":
        shutil.rmtree(directory / "vae")
    if name == "bare":
        for file in (directory / "unet").glob("*.safetensors"):
            file.unlink()
    given = ["--prompt", "a circle", *arguments] if "--prompt" not in arguments else arguments
    assert main(["generate", str(directory), *given]) == 2
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


def test_cai_generate_with_little_memory(pipelines, tmp_path, capsys):
    output = tmp_path / "pictures.png"
    arguments = ["--prompt", "", "a large red circle", "--images", "2", "--steps", "2", "--batch", "3"]
    little = ["--weights", "fp8", "--residency", "host", "--vae", "sliced", "--size", "16x24"]
    given = [str(pipelines["sd"]), *arguments, *little, "--output", str(output)]
    assert main(["generate", *given]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in told] == ["pictures 3/4", "pictures 4/4", str(output)]
    assert [file.name for file in tmp_path.iterdir()] == ["pictures.png"]
    from PIL import Image

    assert Image.open(output).size == (2 * 26 - 2, 2 * 18 - 2)


def test_every_combination_draws(pipelines):
    """Or says that it cannot."""
    for weights, residency, vae in itertools.product(
        ("plain", "int8", "fp8"), ("device", "host"), loading.WAYS
    ):
        sampler = sampler_of(pipelines["dit"], torch.bfloat16, weights=weights, residency=residency, vae=vae)
        assert sampler.pictures(["3"], Options(steps=1)).shape == (1, 16, 16, 3)
