"""Images of all kinds, their captions, and the files that are made of them once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cai_apps import recipes
from cai_apps.applications.diffusion.data.cache import Prepared
from cai_apps.applications.diffusion.data.samples import Images
from cai_apps.applications.diffusion.data.shapes import COLOURS, PLACES, Shapes
from cai_apps.applications.diffusion.data.sources import Crops
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.data.images import Digits, Folder, left_out
from cai_mesh.errors import DataError

RED = (220, 30, 30)


def prepared(cache: Path, recipe: str = "sd-v1-tiny", **changes) -> Prepared:
    always = {"data.cache": str(cache), "data.samples": 20, "train.device": "cpu", "parallel.shard": 1}
    return DIFFUSION.prepare(DIFFUSION.resolve(recipes.load(recipe, always | changes), 1))


def folder(directory: Path, names=("a.png", "b.png", "c.png")) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (number * 20, 100, 0)).save(directory / name)
        (directory / name).with_suffix(".txt").write_text(f"picture {number}")
    return directory


def test_a_shape_has_the_colour_and_the_place_that_its_caption_says():
    shapes = Shapes(60, 64)
    for number in range(60):
        image = shapes.image(number).astype(int)
        for shape in shapes.scene(number):
            row, column = divmod(PLACES.index(shape.place), 3)
            middle = image[int((row + 0.5) * 64 / 3), int((column + 0.5) * 64 / 3)]
            nearest = min(COLOURS, key=lambda name: np.abs(middle - COLOURS[name]).sum())
            assert nearest == shape.colour
            assert shape.text() in shapes.caption(number)
    assert {len(shapes.scene(number)) for number in range(60)} == {1, 2, 3}
    assert np.array_equal(Shapes(5, 64).image(4), shapes.image(4)), "whatever the others are"


def test_digits_and_crops_of_a_photo():
    digits = Digits(16)
    assert digits.size == 1797 and digits.image(0).shape == (16, 16, 3)
    assert digits.caption(5) == f"the digit {digits.labels[digits.label(5)]}"
    crops = Crops(32, "a photo of sks flower")
    pictures = [crops.image(number) for number in range(crops.size)]
    assert len(pictures) == 4 and all(picture.shape == (32, 32, 3) for picture in pictures)
    assert not np.array_equal(pictures[0], pictures[1])


def test_every_kind_of_file_is_read_as_colours(tmp_path):
    Image.new("RGB", (60, 40), RED).save(tmp_path / "colours.png")
    Image.new("RGBA", (60, 40), (*RED, 255)).save(tmp_path / "alpha.png")
    Image.new("RGB", (60, 40), RED).quantize(4).save(tmp_path / "palette.png")
    Image.new("RGB", (60, 40), RED).convert("CMYK").save(tmp_path / "print.jpg")
    Image.new("RGB", (30, 90), RED).save(tmp_path / "high.webp", lossless=True)
    Image.new("RGB", (2, 3), RED).save(tmp_path / "tiny.bmp")
    source = Folder.of(tmp_path, 24, "red")
    for number, file in enumerate(source.files):
        image = source.image(number)
        assert image.shape == (24, 24, 3) and image.dtype == np.uint8
        assert np.abs(image.astype(int) - RED).max() < 12, file.name


@pytest.mark.parametrize("alpha", ["RGBA", "LA", "palette"])
def test_what_is_transparent_is_white(tmp_path, alpha):
    clear = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    clear.paste((*RED, 255), (10, 10, 30, 30))
    made = {"RGBA": clear, "LA": clear.convert("LA"), "palette": clear.convert("P")}[alpha]
    if alpha == "palette":
        made.info["transparency"] = made.getpixel((0, 0))
    made.save(tmp_path / "clear.png")
    image = Folder.of(tmp_path, 40, "red").image(0)
    assert (image[2, 2] > 240).all(), "not whatever colour lies under what is not seen"


def test_sixteen_bits_of_grey_keep_their_shades(tmp_path):
    shades = np.linspace(0, 65535, 40 * 40).reshape(40, 40).astype(np.uint16)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    image = Folder.of(tmp_path, 40, "grey").image(0).astype(int)
    assert image[0, 0, 0] < 10 and image[-1, -1, 0] > 245
    assert abs(int(image[20, 0, 0]) - 128) < 10


def test_a_photo_is_turned_as_its_camera_says(tmp_path):
    photo = Image.new("RGB", (40, 40), (0, 0, 255))
    photo.paste(RED, (0, 0, 40, 20))
    tags = photo.getexif()
    tags[0x0112] = 3  # upside down
    photo.save(tmp_path / "turned.jpg", exif=tags, quality=95)
    image = Folder.of(tmp_path, 40, "a photo").image(0).astype(int)
    assert image[35, 20, 0] > 180 and image[5, 20, 2] > 180


def test_captions_beside_images_in_a_file_of_lines_and_for_all(tmp_path):
    home = folder(tmp_path / "images")
    assert Folder.of(home, 8, None).captions == ("picture 0", "picture 1", "picture 2")
    (home / "b.txt").unlink()
    (home / "c.txt").unlink()
    with pytest.raises(DataError, match="2 of 3 images have no caption"):
        Folder.of(home, 8, None)
    (home / "metadata.jsonl").write_text(json.dumps({"file_name": "b.png", "text": "told"}) + "\n")
    assert Folder.of(home, 8, "all").captions == ("picture 0", "told", "all")
    (home / "metadata.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match=r"metadata\.jsonl:1"):
        Folder.of(home, 8, "all")


def test_a_file_of_lines_names_images_in_directories(tmp_path):
    home = folder(tmp_path / "images", ("one/a.png", "two/a.png"))
    for text in home.rglob("*.txt"):
        text.unlink()
    lines = [{"file_name": f"{name}/a.png", "text": name} for name in ("one", "two")]
    (home / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = Folder.of(home, 8, None)
    assert source.captions == ("one", "two") and source.labels == ("one", "two")
    assert [source.label(number) for number in range(2)] == [0, 1]


def test_a_caption_that_is_no_text_is_named(tmp_path):
    home = folder(tmp_path / "images")
    (home / "b.txt").write_bytes(b"\xff\xfe\x00caption")
    with pytest.raises(DataError, match=r"b\.txt"):
        Folder.of(home, 8, None)


def test_a_directory_without_images_and_a_damaged_one(tmp_path):
    with pytest.raises(DataError, match="no images"):
        prepared(tmp_path / "cache", **{"data.source": str(tmp_path / "nowhere"), "data.caption": "x"})
    home = folder(tmp_path / "images")
    whole = (home / "b.png").read_bytes()
    (home / "b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"damaged image: .*b\.png"):
        prepared(tmp_path / "cache", **{"data.source": str(home)})
    assert not list((tmp_path / "cache").glob("unfinished-*")), "what was begun is taken away"


def test_pictures_that_are_left_out_are_counted(tmp_path):
    home = folder(tmp_path / "images")
    assert left_out(home) == ""
    for name in ("d.tif", "e.TIFF", "f.gif", "g.HEIC", "h.heic", "sub/i.avif", "readme.md", "d.gif.txt"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).touch()
    line = left_out(home)
    assert "1 .tif, 1 .tiff, 1 .gif, 2 .heic, 1 .avif; convert them" in line and ".md" not in line
    config = recipes.load("sd-v1-tiny", {"data.source": str(home)})
    made = prepared(tmp_path / "cache", **{"data.source": str(home), "data.validation_fraction": 0.4})
    assert DIFFUSION.announce(config, made).startswith(line)


def test_a_directory_of_other_pictures_says_what_is_there(tmp_path):
    (tmp_path / "a.HEIC").touch()
    with pytest.raises(DataError, match=r"1 \.heic; convert them"):
        Folder.of(tmp_path, 8, "all")


def test_a_caption_over_the_length_is_cut_and_said(tmp_path, capsys):
    home = folder(tmp_path / "images")
    (home / "b.txt").write_text("a very long caption indeed " * 40)
    prepared(tmp_path / "cache", **{"data.source": str(home)})
    assert "1 of 4 captions are longer than" in capsys.readouterr().out


def test_files_are_made_again_when_anything_changes_and_only_then(tmp_path):
    home, cache = folder(tmp_path / "images"), tmp_path / "cache"

    def now(**changes) -> Path:
        return prepared(
            cache, **{"data.source": str(home), "data.validation_fraction": 0.4} | changes
        ).directory

    first = now()
    assert now() == first
    assert now(**{"train.steps": 7, "optimizer.lr": 1.0}) == first
    found = {first, now(**{"data.size": 16}), now(**{"model.text_encoder": "frozen"})}
    (home / "b.txt").write_text("another caption")
    found.add(now())
    Image.new("RGB", (50, 40), RED).save(home / "a.png")
    found.add(now())
    folder(home, ("d.png",))
    found.add(now())
    found.add(now(**{"model.text_encoder": "frozen", "train.seed": 5}))
    assert len(found) == 7


def test_a_damaged_file_of_the_cache_is_made_again(tmp_path):
    first = prepared(tmp_path)
    file = first.directory / "pixels.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    again = prepared(tmp_path)
    assert again.directory == first.directory and file.read_bytes() == whole
    file.unlink()
    prepared(tmp_path)
    assert file.read_bytes() == whole


def latent_losses(directory: Path, kind: str) -> list[float]:
    """Losses of three batches of sd-v2-tiny, of which only latents are cached or not."""
    changes = {
        "data.latents": kind,
        "data.encoder_dtype": "fp64",
        "precision.compute": "fp64",
        "data.cache": str(directory / kind),
        "data.samples": 24,
        "train.device": "cpu",
        "parallel.shard": 1,
    }
    config = DIFFUSION.resolve(recipes.load("sd-v2-tiny", changes), 1)
    design = load_design(config.model.name)
    assert design.autoencoder is not None
    made = DIFFUSION.prepare(config)
    assert ("pixels" in made.tensors) == (kind == "encoded")
    work = workload(config, design, torch.device("cpu"))
    torch.manual_seed(1)
    model = work.build().double()
    images = Images(made, 0, made.images, 0.2, 0)
    losses = []
    for first in range(0, 24, 8):
        numbers = np.arange(first, first + 8)
        ready = work.ready(images.rows(numbers, numbers))
        with torch.no_grad():
            said = model(**work.inputs(ready))
            losses.append(float(work.loss(model, None)(said, work.target(ready))))  # type: ignore[arg-type]
    return losses


def test_cached_latents_train_as_those_encoded_at_every_step(tmp_path):
    cached, encoded = latent_losses(tmp_path, "cached"), latent_losses(tmp_path, "encoded")
    assert cached == pytest.approx(encoded, rel=1e-9)
    assert len(set(cached)) == 3 and all(map(math.isfinite, cached))


def test_captions_are_dropped_as_often_as_was_asked(tmp_path):
    made = prepared(tmp_path, "dit-tiny", **{"data.source": "digits", "data.size": 16})
    numbers = np.arange(1797)
    rows = Images(made, 0, 1797, 0.3, 0).rows(numbers, numbers)
    assert float((rows["label"] == 10).double().mean()) == pytest.approx(0.3, abs=0.03)
    kept = rows["label"] != 10
    assert torch.equal(rows["label"][kept], made.open("label")[kept])
