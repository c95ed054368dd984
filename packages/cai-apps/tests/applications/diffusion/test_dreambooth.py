"""A subject learned beside its class: whose images make a batch, the loss, the class drawn first, and the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cai_apps import applications, recipes
from cai_apps.applications.diffusion.data.samples import Images, SubjectAndClass
from cai_apps.applications.diffusion.model.denoiser import build
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.report.page import write_report
from cai_apps.run.train import train
from cai_mesh.errors import ConfigError, DataError

CLASS = "a large red circle at the middle"
CHANGES = {
    "train.steps": 2,
    "train.global_batch": 8,
    "train.microbatch_size": 2,
    "train.device": "cpu",
    "precision.compute": "fp64",
    "data.encoder_dtype": "fp64",
    "prior.images": 6,
    "prior.weight": 0.5,
    "sampling.every": 0,
    "sampling.steps": 2,
}


def config_of(directory: Path, recipe: str = "dreambooth-tiny", ranks: int = 1, **more):
    layout = {"parallel.shard": ranks, "parallel.zero": 2, "data.cache": str(directory / "cache")}
    return recipes.load(recipe, CHANGES | layout | more)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An export that a subject can be taught to."""
    directory = tmp_path_factory.mktemp("base")
    changes = {
        "train.steps": 1,
        "data.samples": 20,
        "data.cache": str(directory / "cache"),
        "parallel.shard": 1,
        "sampling.prompts": [],
        "log.directory": str(directory / "run"),
    }
    return train(DIFFUSION, recipes.load("sd-v1-tiny", changes), label="base").export


def test_every_other_place_shows_the_subject(tmp_path):
    config = DIFFUSION.resolve(config_of(tmp_path), 1)
    prepared = DIFFUSION.prepare(config)
    assert prepared.images == 4 + 6
    pairs = SubjectAndClass(Images(prepared, 0, 10, 0.0, 0), 4, 0.5)
    assert pairs.size == 4 * 6
    rows = pairs.rows(np.arange(24), np.arange(24))
    pixels = prepared.open("pixels")
    seen = [int((pixels == row).flatten(1).all(1).nonzero()) for row in rows["pixels"]]
    assert all(number < 4 for number in seen[0::2]) and set(seen[0::2]) == {0, 2}
    everything = {
        *seen,
        *(
            int((pixels == row).flatten(1).all(1).nonzero())
            for row in pairs.rows(np.arange(24), np.arange(1, 25))["pixels"]
        ),
    }
    assert everything == set(range(10)), "both orders together show all"
    assert rows["share"].tolist() == [2.0, 1.0] * 12


def test_the_loss_is_the_subjects_mean_and_the_weighted_mean_of_its_class(tmp_path):
    config = DIFFUSION.resolve(config_of(tmp_path), 1)
    design = load_design(config.model.name)
    prepared = DIFFUSION.prepare(config)
    batch = SubjectAndClass(Images(prepared, 0, 10, 0.0, 0), 4, 0.5).rows(np.arange(8), np.arange(8))
    work = workload(config, design, torch.device("cpu"))
    torch.manual_seed(0)
    model = build(design, train_text=True).double()
    ready = work.ready(batch)
    with torch.no_grad():
        said = model(**work.inputs(ready))
        summed = work.loss(model, None)(said, work.target(ready))  # type: ignore[arg-type]
    each = (said - ready["target"]).square().flatten(1).mean(1)
    torch.testing.assert_close(summed / 8, each[0::2].mean() + 0.5 * each[1::2].mean(), rtol=1e-12, atol=0.0)


def test_the_same_on_one_rank_and_two(tmp_path):
    found = []
    for ranks in (1, 2):
        run = tmp_path / f"on-{ranks}"
        config = config_of(tmp_path, ranks=ranks, **{"log.directory": str(run), "sampling.prompts": []})
        export = train(DIFFUSION, config, label="subject").export
        found.append(load_file(export / "unet" / "diffusion_pytorch_model.safetensors"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_the_class_is_drawn_by_the_base_and_pictures_show_before_and_after(tmp_path, base):
    run = tmp_path / "run"
    more = {
        "model.name": str(base),
        "model.weights": "pretrained",
        "prior.source": "generated",
        "prior.prompt": CLASS,
        "sampling.every": 1,
        "sampling.prompts": ["a photo of sks flower", CLASS],
        "log.directory": str(run),
    }
    config = config_of(tmp_path, **more)
    finished = train(DIFFUSION, config, label="subject")
    (home,) = (tmp_path / "cache").glob("class-*")
    files = sorted(home.glob("*.png"))
    assert len(files) == 6
    drawing = Options(32, steps=2, guidance=config.sampling.guidance)
    sampler = Sampler(base, device="cpu", dtype=torch.float32)
    np.testing.assert_array_equal(
        [np.asarray(Image.open(f)) for f in files], sampler.pictures([CLASS] * 6, drawing)
    )

    before = np.asarray(Image.open(run / "pictures" / "before" / "last" / "1.png"))
    np.testing.assert_array_equal(before, sampler.pictures([CLASS], drawing, first=1)[0])
    assert sorted(d.name for d in (run / "pictures").iterdir()) == ["1", "2", "before"]
    page = applications.of(config).report()
    text = write_report(finished, run / "report.html", page).read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2 * 3
    assert text.index("<th>before") < text.index("<th>step 1") < text.index("<th>step 2")

    files[3].unlink()
    files[5].unlink()
    kept = files[0].stat().st_mtime_ns
    again = DIFFUSION.prepare(DIFFUSION.resolve(config, 1))
    assert again.images == 10 and files[3].is_file() and files[5].is_file()
    assert files[0].stat().st_mtime_ns == kept, "what was drawn is not drawn again"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prior.source": "generated"}, "prior.prompt is empty"),
        ({"prior.source": "generated", "prior.prompt": "a dog"}, "training begins with"),
        ({"train.global_batch": 7, "train.microbatch_size": 7}, "half of a batch"),
        ({"data.validation_fraction": 0.5}, "spared for validation"),
        ({"prior.weight": -1.0}, "prior.weight"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        DIFFUSION.resolve(config_of(tmp_path, **more), 1)


def test_labels_have_no_class_images(tmp_path):
    with pytest.raises(ConfigError, match="labels"):
        DIFFUSION.resolve(config_of(tmp_path, "dit-tiny"), 1)


def test_too_few_images(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(images / f"{number}.png")
    config = DIFFUSION.resolve(config_of(tmp_path, **{"data.source": str(images)}), 1)
    with pytest.raises(DataError, match="too few images of the subject"):
        DIFFUSION.prepare(config)
    (images / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"broken\.jpg"):
        DIFFUSION.prepare(config)
    config = DIFFUSION.resolve(
        config_of(tmp_path, **{"prior.source": str(images), "prior.prompt": "a dog"}), 1
    )
    with pytest.raises(DataError, match="too few images of the class"):
        DIFFUSION.prepare(config)
