"""A trained model as a directory that `DiffusionPipeline.from_pretrained`, and each part's own class, opens.

export/          the averaged weights where there are some, else the last; frozen parts, tokenizer, scheduler
export/raw/      with an average: the last weights of the trained parts
export/lora/     with adapters: they alone, for `load_lora_weights` of diffusers; the weights above have them too
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.denoiser import parts, targets
from cai_apps.applications.diffusion.model.design import LABELS, RAW, TEXTS, Design, is_t5
from cai_apps.applications.diffusion.model.encoders import encoder_directory, load_autoencoder, load_text
from cai_apps.applications.diffusion.model.tensor_parallel import trains_text
from cai_apps.compose.lora import merged, plain_name, save_adapters
from cai_apps.compose.published_names import hub_name
from cai_mesh.checkpoint import save_hf
from cai_mesh.layout import BoxedTensor

if TYPE_CHECKING:
    from cai_apps.compose.session import Session

ADAPTERS = "lora"
"""Folder of an export with the adapters alone."""
PIPELINES = {
    "UNet": "StableDiffusionPipeline",
    "DiT": "DiTPipeline",
    "SD3": "StableDiffusion3Pipeline",
}
"""The pipelines of diffusers that open an export with an autoencoder, by family."""


def export(session: Session, design: Design, config: Config, directory: Path, run: Path) -> None:
    """Write the model as it stands. Collective; the files are seen by all ranks.

    Args:
        run: directory of the run, which holds tokenizers and names of labels.
    """
    average, masters = session.average, session.weights.masters()
    _save(session, design, config, directory, masters if average is None else average.values())
    if average is not None:
        _save(session, design, config, directory / RAW, masters)
    trained = parts(design, train_text=trains_text(config, design))
    if dist.get_rank() == 0:
        _write_beside(design, config, directory, run, set(trained.values()))
    dist.barrier()


def _save(
    session: Session,
    design: Design,
    config: Config,
    directory: Path,
    weights: Mapping[str, BoxedTensor] | None,
) -> None:
    train_text = trains_text(config, design)
    trained = parts(design, train_text=train_text)
    boxed_weights = dict(weights) if weights is not None else BoxedTensor.of_model(session.model)
    if config.lora.rank:
        adapted = targets(design, config.lora, train_text=train_text)
        save_adapters(session.model, directory / ADAPTERS, boxed_weights, config.lora, adapted, trained)
        boxed_weights = merged(session.model, boxed_weights, config.lora)
    for prefix, folder in trained.items():
        save_hf(
            session.model,
            directory / folder,
            weights=_all_names(design, boxed_weights),
            within=prefix,
            names=_published(session.model, prefix),
            dtype=torch.float32,
        )


def _published(model: nn.Module, prefix: str) -> Callable[[str], str | None]:
    """Return what the files of a part of a model call a parameter, by its full name."""
    part = model.get_submodule(prefix.removesuffix("."))

    def name(full: str) -> str | None:
        plain = plain_name(full)
        if plain is None or not plain.startswith(prefix):
            return plain
        return f"{prefix}{hub_name(part, plain.removeprefix(prefix))}"

    return name


def _all_names(design: Design, weights: dict[str, BoxedTensor]) -> dict[str, BoxedTensor]:
    """Return weights with the names of every block for the embedding that the blocks of a DiT share."""
    if design.family.name != "DiT":
        return weights
    first = "denoiser.transformer_blocks.0.norm1.emb."
    shared = {name.removeprefix(first): boxed for name, boxed in weights.items() if name.startswith(first)}
    blocks = range(1, design.denoiser["num_layers"])
    return weights | {
        first.replace(".0.", f".{block}.") + name: boxed for block in blocks for name, boxed in shared.items()
    }


def _write_beside(design: Design, config: Config, directory: Path, run: Path, trained: set[str]) -> None:
    """Frozen parts, tokenizers, the scheduler, and the file that says what all of it is."""
    import diffusers

    options = {"seed": config.train.seed, "dtype": torch.float32, "device": "cpu"}
    source = encoder_directory(config, design)
    autoencoder = load_autoencoder(design, **options, directory=source)
    if autoencoder.model is not None:
        autoencoder.model.save_pretrained(directory / "vae")
    if not trained.intersection(TEXTS):
        for number, folder in enumerate(TEXTS[: len(design.texts)]):
            text: Any = load_text(design, number, **options, directory=source)
            weights = {hub_name(text, name): value for name, value in text.state_dict().items()}
            text.save_pretrained(directory / folder, state_dict=weights)
    for suffix in ("", "_2", "_3")[: len(design.texts)]:
        home = run / f"tokenizer{suffix}" if (run / f"tokenizer{suffix}").is_dir() else run / "tokenizer"
        shutil.copytree(home, directory / f"tokenizer{suffix}", dirs_exist_ok=True)
    if (run / LABELS).is_file():
        shutil.copy(run / LABELS, directory / LABELS)
    scheduler = getattr(diffusers, design.scheduler["_class_name"]).from_config(dict(design.scheduler))
    scheduler.save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(index_of(design), indent=2), encoding="utf-8")


def index_of(design: Design) -> dict[str, object]:
    """model_index.json: the parts with the libraries they are of."""
    index: dict[str, object] = {
        "_class_name": PIPELINES[design.family.name],
        design.family.folder: ["diffusers", design.denoiser["_class_name"]],
        "scheduler": ["diffusers", design.scheduler["_class_name"]],
    }
    if design.autoencoder is None:
        return index | {"fold": design.fold}
    index["vae"] = ["diffusers", "AutoencoderKL"]
    for number, text in enumerate(design.texts):
        index[TEXTS[number]] = ["transformers", text.get("architectures", ["CLIPTextModel"])[0]]
        tokenizer = "T5TokenizerFast" if is_t5(text) else "CLIPTokenizer"
        index[f"tokenizer{'' if number == 0 else f'_{number + 1}'}"] = ["transformers", tokenizer]
    missing = TEXTS[len(design.texts) :] if design.family.name == "SD3" else ()
    for name in missing:
        index |= {name: [None, None], name.replace("text_encoder", "tokenizer"): [None, None]}
    if design.family.name == "UNet":
        index |= {
            "safety_checker": [None, None],
            "feature_extractor": [None, None],
            "requires_safety_checker": False,
        }
    return index
