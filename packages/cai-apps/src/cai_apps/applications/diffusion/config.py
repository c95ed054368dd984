"""What a run of a diffusion model is, beside the sections of every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cai_apps.config import sections
from cai_apps.config.ranges import FILLED, NATURAL, PART, POSITIVE, SEED, Range

DRAWN = ("shapes", "digits", "flower")
"""Sources of images that are made or held here; they are squares."""
GENERATED = "generated"
"""The source of images of a class that are drawn by the pretrained weights."""


@dataclass(frozen=True)
class Model:
    name: Annotated[str, FILLED] = "sd-v1-tiny"
    """A preset, a directory in the layout of diffusers' pipelines, or a hub id."""
    weights: Literal["random", "pretrained"] = "random"
    """random: made from train.seed; pretrained: read from the directory (or hub id)."""
    text_encoder: Literal["frozen", "trained"] = "frozen"
    """frozen: captions are embedded once, by weights read or random; trained: it learns with the denoiser."""


@dataclass(frozen=True)
class Data:
    source: Annotated[str, FILLED] = "shapes"
    """'shapes' (coloured shapes, drawn here), 'digits' (scikit-learn's 1,797 scans), 'flower' (four crops of a photo
    of scikit-learn's), or a directory of images, each with a caption in a .txt file of its name, or in a metadata.jsonl
    with "file_name" and "text"; the name of the subdirectory is its label."""
    size: Annotated[int, Range(least=1, most=16384)] = 64
    """Side of the square that an image is scaled and cropped to, in pixels."""
    max_ratio: Annotated[float, Range(least=1)] = 1.0
    """Longest side over shortest. Above 1 images of a directory are cropped to the nearest of several shapes of about
    size x size pixels, and a batch is of one shape; 1: to squares."""
    samples: Annotated[int, Range(least=2)] = 20000
    """Number of shapes that are drawn."""
    caption: str | None = None
    """Caption of every image that has none of its own."""
    latents: Literal["cached", "encoded"] = "cached"
    """cached: the encoders run once, before training; encoded: at every step, on the device."""
    encoder_dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Dtype of frozen encoders, and of what they make."""
    validation_fraction: Annotated[float, PART] = 0.02
    """Part of the images that is kept for validation and never trained on."""
    cache: Annotated[str, FILLED] = "~/.cache/cai"
    """Directory for latents, embeddings and tokenizers."""


@dataclass(frozen=True)
class Prior:
    """Images of the class of a subject, learned one for one with those of data.source (DreamBooth,
    arXiv:2208.12242)."""

    images: Annotated[int, NATURAL] = 0
    """How many; 0: what data.source holds is no single subject."""
    prompt: str = ""
    """Their caption, as "a photo of a dog"; empty: each has its own."""
    source: Annotated[str, FILLED] = GENERATED
    """generated: drawn before training by the pretrained weights, as `sampling` says; else as data.source."""
    weight: Annotated[float, NATURAL] = 1.0
    """Weight of their loss, beside the subject's."""


@dataclass(frozen=True)
class Objective:
    prediction: Literal["epsilon", "v", "flow"] = "epsilon"
    """What the denoiser learns to say: the noise, the velocity between image and noise, or the flow from one to the
    other. It must be what the scheduler of the model goes by."""
    min_snr: Annotated[float | None, POSITIVE] = None
    """Caps the weight of times with little noise (arXiv:2303.09556), usually 5; None: all weigh the same."""
    offset_noise: Annotated[float, NATURAL] = 0.0
    """Share of noise that is alike all over a channel, so that images can be dark or bright; usually 0.05."""
    condition_dropout: Annotated[float, PART] = 0.1
    """How often a sample's caption is left empty, or its label unknown, for guidance without a classifier."""
    timesteps: Literal["uniform", "logit_normal"] = "uniform"
    """How times are drawn; logit_normal: of a flow, mostly in the middle."""


@dataclass(frozen=True)
class Sampling:
    prompts: tuple[str, ...] = ()
    """Captions (or labels) that pictures are drawn for, by the weights before training where they are pretrained, on
    the way and at the end; `cai report` shows them."""
    steps: Annotated[int, Range(least=1, most=1000)] = 20
    """Denoising steps of a picture."""
    guidance: float = 4.0
    """How far what the condition changes is taken (arXiv:2207.12598); 1: as far as it was learned."""
    scheduler: Literal["auto", "ddim", "dpm", "flow"] = "auto"
    """auto: DPM-Solver++ (arXiv:2211.01095), and Euler steps for a flow; all by the config of the model's own."""
    seed: Annotated[int, SEED] = 0
    """Picture number i starts from noise of (seed, i)."""
    every: Annotated[int, NATURAL] = 0
    """Steps between pictures on the way; 0: only at the end."""


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["diffusion"] = "diffusion"
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    prior: Prior = field(default_factory=Prior)
    lora: sections.LoRA = field(default_factory=sections.LoRA)
    objective: Objective = field(default_factory=Objective)
    sampling: Sampling = field(default_factory=Sampling)
