"""The model of a place over ranks that compute it together: each reads its own part of the weights, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.applications.language.generate import Place, put_adapter
from cai_apps.applications.language.weights import reader
from cai_apps.compose.adapter_files import load_adapter
from cai_apps.compose.expert_adapters import check_tensor_ranks, let_adapters_compute
from cai_apps.compose.experts_form import let_experts_compute
from cai_apps.compose.lora import initializer, is_adapter, need_peft
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.compose.pretrained import check_causal, check_room
from cai_apps.compose.quantized_base import QuantizedBase, check_quantized, codes_of
from cai_apps.compose.sharding import share_tied
from cai_apps.config.adapters import read_adapter
from cai_apps.engine.llm import check_kind
from cai_apps.engine.plan import check_heads
from cai_mesh.errors import ConfigError
from cai_mesh.files import check_header, weight_files
from cai_pipeline import split
from cai_tensor_parallel import parallelize

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Dtypes of weights, by their names in files of safetensors."""


def check_degrees(place: Place, tensor: int, pipeline: int) -> None:
    """Look at what the files say of a model, before a rank is started.

    Args:
        place: the directories of the model.
        tensor: tensor ranks.
        pipeline: stages.

    Raises:
        ConfigError: the model cannot be cut over so many ranks.
    """
    if tensor * pipeline == 1:
        return
    config = load_model_config(str(place.model)).get_text_config()
    check_heads(str(place.model), config, tensor)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is not None and layers < pipeline:
        raise ConfigError(
            f"the layers of {place.model} are fewer than the stages",
            got=f"{layers} layers, {pipeline} stages",
            expected=f"at most {layers}",
            fix="--pipeline fewer, or --tensor in its place",
        )
    if tensor > 1 and place.base != "compute":
        raise ConfigError(
            "codes of a quantized base are not cut over tensor ranks",
            got=f"--base {place.base}, {tensor} tensor ranks",
            fix=f"--pipeline {tensor} divides the layers, or leave --base out",
        )


def open_over_ranks(place: Place, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return this rank's part of the model of a place, in the dtype of its files and in evaluation. Collective.

    The model is transformed before it has memory; then each rank makes its blocks, one at a time, and reads its part
    of the files.

    Args:
        place: the directories of the model.
        mesh: a mesh with axes "pp" and "tp", all of whose ranks compute it together.
        device: the place of this rank's part.

    Raises:
        ConfigError, CheckpointError: as `cai_apps.applications.language.generate.generate`, or the engine computes no
            such model.
        PlanError: the model cannot be split or cut so.
    """
    check_causal(place.model)
    adapter = None if place.adapter is None else read_adapter(place.adapter)
    if device.type == "cuda":
        check_room(place.model, torch.cuda.mem_get_info(device)[0], ranks=mesh.size())
    config = load_model_config(str(place.model))
    dtype = getattr(config, "dtype", None) or _dtype_of(place.model)
    model = meta_model(config).requires_grad_(False)
    let_experts_compute(model, dtype)
    check_kind(model)
    if adapter is not None:
        need_peft()
        put_adapter(model, adapter, place)
    check_tensor_ranks(model, mesh["tp"].size())
    check_quantized(model, place.base)
    split(model, mesh)
    let_adapters_compute(model)
    parallelize(model, mesh)
    _fill(model, place, dtype, device)
    if adapter is not None:
        load_adapter(model, adapter.directory)
    return model.requires_grad_(False).eval()


def _fill(model: Any, place: Place, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model its part of the weights of a place."""
    from transformers import GenerationConfig

    read = reader(str(place.model), lambda: place.model)
    finished = None if place.base == "compute" else QuantizedBase(place.base, read).filler(model)
    materialize(model, initializer, seed=0, dtype=dtype, device=device, pretrained=True, finished=finished)
    for param in model.parameters():
        share_tied(param, param)
    codes = codes_of(model)
    read(model, lambda name: name not in codes and not is_adapter(name))
    if (place.model / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(place.model)


def _dtype_of(directory: Path) -> torch.dtype:
    """Return the dtype of the first weight of floating point in the files of a directory."""
    for name in weight_files(directory, error=ConfigError).names:
        for tensor in check_header(directory / name).values():
            if tensor["dtype"] in DTYPES:
                return DTYPES[tensor["dtype"]]
    return torch.float32
