"""The order of transforms, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.config import Config
from cai_apps.validate import mesh_spec
from cai_mesh.build import build_mesh
from cai_mesh.errors import ConfigError


@dataclass
class Session:
    config: Config
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor:
        total = torch.zeros((), device=microbatches[0]["input_ids"].device)
        for batch in microbatches:
            loss = self._loss(batch) / total_tokens
            loss.backward()
            total += loss.detach()
        return total

    def update(self, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor:
        return torch.stack([self._loss(batch) / total_tokens for batch in microbatches]).sum()

    def export(self, directory, tokenizer) -> None:
        self.model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def apply(config: Config, model_config: Any, *, device: torch.device) -> Session:
    from transformers import AutoModelForCausalLM

    if mesh_spec(config).world_size > 1:
        raise ConfigError("one rank only for now")
    torch.manual_seed(config.train.seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[config.precision.compute]
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    return Session(config, build_mesh(mesh_spec(config), device_type=device.type), model, optimizer)
