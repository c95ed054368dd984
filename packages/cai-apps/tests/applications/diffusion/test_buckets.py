"""Images of several shapes: their shapes, what a batch holds, and a run on any layout beside a plain loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from cai_apps import recipes
from cai_apps.applications.diffusion.data.buckets import Buckets
from cai_apps.applications.diffusion.data.ratios import nearest, shapes_of
from cai_apps.applications.diffusion.data.samples import Images, draw
from cai_apps.applications.diffusion.model.denoiser import build, initializer
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.data.batches import PRESENT, Batches, count_present
from cai_apps.data.images import Folder
from cai_apps.run.train import train
from cai_mesh.comm import all_reduce
from cai_mesh.errors import ConfigError, DataError
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import assert_same_as_one_device, run_ranks

SIDES = (
    (60, 60),
    (40, 90),
    (90, 40),
    (64, 90),
    (61, 60),
    (30, 120),
    (45, 44),
    (90, 41),
    (40, 88),
    (200, 200),
)
"""Height and width of the images in the directory."""


def test_the_shapes_have_about_as_many_pixels_as_the_square():
    found = shapes_of(512, 2.0, 64)
    assert (512, 512) in found
    assert {(h, w) for h, w in found} == {(w, h) for h, w in found}
    for height, width in found:
        assert height % 64 == width % 64 == 0
        assert 0.8 * 512 * 512 <= height * width <= 512 * 512
        assert max(height, width) <= 2 * min(height, width)
    assert (640, 384) in found and (384, 640) in found and (576, 448) in found
    assert shapes_of(512, 1.0, 64) == [(512, 512)]
    assert shapes_of(512, 1e9, 8) == shapes_of(512, 1e300, 8) == shapes_of(512, 64.0, 64), "a side has an end"
    assert len(shapes_of(512, 2.0, 8)) == len(found), "as coarse where sides may be finer"
    assert all(h % 24 == 0 and w % 24 == 0 for h, w in shapes_of(96, 3.0, 24))


def test_the_nearest_shape_is_that_of_the_nearest_ratio():
    known = [(64, 32), (48, 48), (32, 64)]
    assert [nearest(shape, known) for shape in ((100, 50), (100, 90), (10, 30), (1, 1))] == [0, 1, 2, 1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIDES):
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / f"{number}.png")
    return home


def config_of(directory: Path, cache: Path, ranks: int = 1, recipe: str = "sd-v1-tiny", **more: Any) -> Any:
    changes = {
        "data.source": str(directory),
        "data.caption": "noise",
        "data.size": 32,
        "data.max_ratio": 2.5,
        "data.cache": str(cache),
        "data.encoder_dtype": "fp64",
        "data.validation_fraction": 0.0,
        "train.validate_every": 0,
        "precision.compute": "fp64",
        "parallel.shard": ranks,
        "parallel.zero": 3,
        "train.device": "cpu",
        "train.steps": 3,
        "train.global_batch": 4,
        "train.microbatch_size": 2,
        "optimizer.ema_decay": None,
        "sampling.prompts": [],
    }
    return DIFFUSION.resolve(recipes.load(recipe, changes | more), ranks)


def buckets_of(config: Any) -> Buckets:
    prepared = DIFFUSION.prepare(config)
    return Buckets(Images(prepared, 0, prepared.images, 0.0, 0), config.train.global_batch, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_that_are_read_once_each_count_once_and_batches_have_one_shape(directory, tmp_path, ranks):
    prepared = DIFFUSION.prepare(config_of(directory, tmp_path))
    samples = Buckets(Images(prepared, 0, prepared.images, 0.0, 0), 4, 0, once=True)
    seen = []
    for step in range(samples.size // 4):
        parts = [Batches(samples, 4, 2, rank, ranks, None).at(4 * step) for rank in range(ranks)]
        batches = [batch for part in parts for batch in part]
        assert len({batch["pixels"].shape[1:] for batch in batches}) == 1
        assert sum(len(batch["u"]) for batch in batches) == 4
        for batch in batches:
            seen += [
                p.numpy().tobytes() for p, there in zip(batch["pixels"], batch[PRESENT], strict=True) if there
            ]
            assert count_present(batch, 2) == int(batch[PRESENT].sum())
    assert len(seen) == len(set(seen)) == prepared.images


def test_an_image_is_cut_to_the_shape_that_it_is_nearest_to(directory, tmp_path):
    config = config_of(directory, tmp_path)
    prepared, source = DIFFUSION.prepare(config), Folder.of(directory, 32, "noise")
    known = shapes_of(32, 2.5, load_design("sd-v1-tiny").multiple)
    bucket, row = prepared.open("bucket"), prepared.open("row")
    assert len(set(bucket.tolist())) >= 3
    for number, sides in enumerate(SIDES):
        shape = known[nearest(sides, known)]
        assert source.shape(number) == sides
        held = prepared.open(f"pixels.{int(bucket[number])}")[row[number]]
        assert tuple(held.shape) == (3, *shape)
        np.testing.assert_array_equal(held.permute(1, 2, 0), source.image(number, shape))


def test_a_photo_that_lies_on_its_side_is_as_high_as_it_looks(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (90, 40)).save(tmp_path / "phone.jpg", exif=exif)
    source = Folder.of(tmp_path, 32, "a photo")
    assert source.shape(0) == (90, 40)
    assert source.image(0, (48, 16)).shape == (48, 16, 3)


def test_a_batch_has_one_shape_and_every_image_is_as_likely(directory, tmp_path):
    config = config_of(directory, tmp_path)
    samples = buckets_of(config)
    bucket = samples.images.prepared.open("bucket")
    seen = np.zeros(samples.size)
    everything = {
        int(bucket[i]): samples.images._pictures(torch.tensor([i]))["pixels"].shape for i in range(10)
    }
    for number in range(600):
        place = np.arange(number * 4, number * 4 + 4)
        found = samples.rows(place, place)
        assert found["pixels"].shape[1:] in {shape[1:] for shape in everything.values()}
        halves = [samples.rows(place[half], place[half])["pixels"] for half in (slice(2), slice(2, 4))]
        assert torch.equal(torch.cat(halves), found["pixels"]), "as two ranks read them"
        for image in found["pixels"]:
            seen[which(samples, image)] += 1
    share = seen / seen.sum()
    assert seen.sum() == 2400 and np.abs(share - 0.1).max() < 0.05
    with pytest.raises(DataError, match="two shapes"):
        samples.rows(np.arange(2, 6), np.arange(2, 6))


def which(samples: Buckets, image: torch.Tensor) -> int:
    """The number of an image of the directory."""
    prepared = samples.images.prepared
    bucket, row = prepared.open("bucket"), prepared.open("row")
    for number in range(prepared.images):
        held = prepared.open(f"pixels.{int(bucket[number])}")[row[number]]
        if held.shape == image.shape and torch.equal(held, image):
            return number
    raise AssertionError("no image of the directory")


STEPS, LR = 5, 0.001


def trained(directory: Path, cache: Path, recipe: str, ranks: int):
    """Losses and weights of a run, on every rank."""
    config = config_of(directory, cache, ranks, recipe)
    work = workload(config, load_design(config.model.name), torch.device("cpu"))
    session = apply(config, work, device=torch.device("cpu"))
    batches = Batches(buckets_of(config), 4, 2, dist.get_rank(), ranks, 0)
    losses = []
    for step in range(STEPS):
        loss = session.step(batches.at(step * 4), total=4).clone()
        session.update(LR, float(session.norm()))
        all_reduce(loss, dist.group.WORLD)
        losses.append(float(loss))
    weights = BoxedTensor.of_model(session.model)
    return losses, {name: each.to_full(dist.group.WORLD) for name, each in weights.items()}


@pytest.mark.parametrize("recipe", ["sd-v1-tiny", "sd3-tiny"])
def test_one_rank_and_two_equal_a_plain_loop(recipe, directory, tmp_path):
    losses, weights, shapes = twin(config_of(directory, tmp_path, recipe=recipe))
    assert len(shapes) > 1, "the batches of this test are of several shapes"
    for ranks in (1, 2):
        found = run_ranks(ranks, trained, directory, tmp_path, recipe, ranks, timeout=240)[0]
        assert found[0] == pytest.approx(losses, abs=1e-9)
        assert_same_as_one_device(found[1], weights, tolerance=1e-7)


def twin(config: Any):
    """Losses and weights of a plain loop, and the shapes of its batches."""
    design, device = load_design(config.model.name), torch.device("cpu")
    with torch.device("meta"):
        model = build(design, train_text=True)
    model = materialize(
        model, initializer(design), seed=config.train.seed, dtype=torch.float64, device=device
    )
    options = {"lr": LR, "betas": (0.9, config.optimizer.beta2), "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    work, samples = workload(config, design, device), buckets_of(config)
    loss_of, losses, shapes = work.loss(model, None), [], set()  # type: ignore[arg-type]
    for step in range(STEPS):
        place = np.arange(step * 4, step * 4 + 4)
        batch = work.ready(samples.rows(place, place))
        shapes.add(batch["noisy"].shape[2:])
        loss = loss_of(model(**work.inputs(batch)), work.target(batch)) / 4
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}, shapes


def test_no_two_samples_have_the_same_noise():
    position = torch.arange(40)
    large, small = torch.zeros(40, 3, 4, 5), torch.zeros(40, 3, 4, 4)
    of_small = draw(small[:20], position[:20], 0, "noise", 60)
    of_large = draw(large[20:], position[20:], 0, "noise", 60)
    everything = torch.cat([of_small.flatten(), of_large.flatten()])
    assert len(everything.unique()) == len(everything)
    assert torch.equal(draw(large, position, 0, "noise"), draw(large, position, 0, "noise", 60))


def test_batches_of_several_shapes_share_no_noise(directory, tmp_path):
    config = config_of(directory, tmp_path)
    samples, device = buckets_of(config), torch.device("cpu")
    work = workload(config, load_design(config.model.name), device)
    places = [np.arange(number * 4, number * 4 + 4) for number in range(8)]
    noise = [work.ready(samples.rows(place, place))["target"] for place in places]
    assert len({each.shape for each in noise}) > 1
    everything = torch.cat([each.flatten() for each in noise])
    assert len(everything.unique()) == len(everything)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data.source": "shapes"}, "are squares"),
        ({"data.max_ratio": 0.5}, "data.max_ratio"),
        ({"prior.images": 3, "prior.source": "shapes"}, "its class"),
    ],
)
def test_what_cannot_be_is_refused(directory, tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        config_of(directory, tmp_path, **more)


def test_labels_of_squares(directory, tmp_path):
    with pytest.raises(ConfigError, match="takes squares"):
        config_of(directory, tmp_path, recipe="dit-tiny", **{"data.size": 16})


def test_the_command_trains_and_validates(directory, tmp_path):
    where = {"log.directory": str(tmp_path / "run"), "precision.compute": "fp32"}
    check = {
        "data.validation_fraction": 0.4,
        "train.validate_every": 1,
        "train.steps": 2,
    }
    finished = train(DIFFUSION, config_of(directory, tmp_path / "cache", **where, **check), label="buckets")
    lines = [json.loads(line) for line in finished.metrics.read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["validation_loss"]) for line in lines)
