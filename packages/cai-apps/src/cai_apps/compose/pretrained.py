"""A causal language model of a directory, on one device, as transformers opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cai_apps.compose.experts_form import let_experts_compute
from cai_apps.compose.models import read_model_config
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import check_weights, weight_files

if TYPE_CHECKING:
    import torch


def check_causal(directory: Path) -> None:
    """Look at the files of a directory, before anything is allocated.

    Raises:
        ConfigError: it has no weights in safetensors, or those of a model that judges texts.
        CheckpointError: an index names files outside it, or the header of a file is not sound.
    """
    check_weights(directory)
    weight_files(directory, error=ConfigError)
    architectures = read_model_config(str(directory)).get("architectures") or ["a causal model"]
    if str(architectures[0]).endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{directory} holds a model that judges texts and writes none",
            got=str(architectures[0]),
            expected="a causal language model",
            fix="open it by AutoModelForSequenceClassification of transformers",
        )


def check_room(directory: Path, room: int, *, ranks: int = 1) -> None:
    """Raise ConfigError where the weights of a directory are larger than a GPU has room for.

    Args:
        directory: a directory of Hugging Face with weights in safetensors.
        room: bytes that are free on the GPU.
        ranks: GPUs over which the weights are divided.
    """
    names = weight_files(directory, error=ConfigError).names
    size = sum((directory / name).stat().st_size for name in names)
    if size // ranks > room:
        enough = 1 << (-(-size // max(room, 1)) - 1).bit_length()
        raise ConfigError(
            f"the weights of {directory} are larger than what is free on the GPU",
            got=f"{size / ranks / 2**30:.1f} GiB",
            expected=f"at most {room / 2**30:.1f} GiB",
            fix=f"take {enough} tensor ranks, each on a GPU (`cai serve --tensor {enough}`, LLM(model, ranks=...)), or "
            "--base nf4",
        )


def open_pretrained(directory: Path, device: torch.device | None = None) -> Any:
    """Return the model of a directory, in the dtype of its files and in evaluation.

    Args:
        directory: a directory of Hugging Face with config and weights.
        device: the place of its weights; None: the host.

    Raises:
        ConfigError, CheckpointError: as `check_causal` and `check_room`, or the directory lacks weights of its model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_causal(directory)
    if device is not None and device.type == "cuda":
        check_room(directory, torch.cuda.mem_get_info(device)[0])
    model = opened(AutoModelForCausalLM, directory, "causal language model")
    let_experts_compute(model, model.dtype)
    return model.to(device).eval()


def opened(make: Any, directory: Path, kind: str) -> Any:
    """Return the model that a class of transformers reads from a directory.

    Args:
        make: the class, such as AutoModelForCausalLM.
        directory: a directory of Hugging Face with config and weights in safetensors.
        kind: the name of such a model in errors.

    Raises:
        CheckpointError: the weights cannot be read, are those of another model, or some are missing.
    """
    try:
        model, report = make.from_pretrained(
            directory, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory} holds no {kind}, or the weights of another one",
            cause=(str(error).splitlines() or [""])[0],
            fix="check that config.json is the one these weights were made with",
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{directory} lacks weights of its model",
            got=", ".join(missing[:5]),
            cause="they would be random numbers",
            fix="export or download it again, or train what is missing first",
        )
    return model
