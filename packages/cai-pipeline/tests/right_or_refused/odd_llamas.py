"""Models whose layers, randomness or outputs a pipeline has to get right or refuse."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from pipeline_families import config_of


class Base(hf.LlamaForCausalLM):
    """A llama whose loop over layers is written out, for others to change."""

    def between(self, index: int, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return hidden

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def runs(self, index: int) -> bool:
        return True

    def forward(self, input_ids: Any, labels: Any = None, shift: bool = False, **_: Any) -> Any:
        hidden = first = self.start(self.model.embed_tokens(input_ids))
        positions = torch.arange(input_ids.shape[1])[None]
        rope = self.model.rotary_emb(hidden, positions)
        for index, layer in enumerate(self.model.layers):
            if self.runs(index):
                hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
                hidden = self.between(index, hidden, first)
        logits = self.lm_head(self.model.norm(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        if shift:
            logits = logits + first.mean()
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class SharedNoise(Base):
    """In training every layer adds the same noise, drawn once before the first."""

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        self.noise = torch.randn_like(hidden) if self.training else 0.0
        return hidden

    def between(self, index: int, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return hidden if index == 3 else hidden + 0.1 * self.noise


class NoiseFirst(Base):
    """In training the first layer's input has noise."""

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * torch.randn_like(hidden) if self.training else hidden


class SometimesShorter(Base):
    """In training an inner layer is left out once in many steps."""

    def runs(self, index: int) -> bool:
        return not (self.training and index == 1 and torch.rand(()) < 1e-3)


class LateSkip(Base):
    """The ninth layer adds what went into the first, and no other does."""

    def between(self, index: int, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return hidden + first if index == 9 else hidden


ODD = {each.__name__: each for each in (Base, SharedNoise, NoiseFirst, SometimesShorter, LateSkip)}


def build(name: str, layers: int = 4) -> torch.nn.Module:
    """One of `ODD`, or a family of transformers, in float64 with the same values in every process."""
    if name in ODD:
        model = ODD[name](config_of("llama", layers)).double()
    else:
        model = hf.AutoModelForCausalLM.from_config(
            mixture(layers) if name == "mixtral" else config_of(name, layers)
        )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model


def mixture(layers: int) -> Any:
    config = hf.MixtralConfig(
        hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return config
