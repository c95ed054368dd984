"""Small configs of the model families that split promises, with whatever makes each of them special."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers as hf

from cai_mesh.layout import canonical_name, reduce_of

_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
_KV: dict[str, Any] = {"num_key_value_heads": 2}
_GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}
_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES = (
    "llama",
    "llama-tied",
    "gpt2",
    "qwen3",
    "gemma2",
    "gemma3",
    "opt",
    "opt-projected",
    "granite",
    "mistral",
    "bloom",
    "gptj",
)


def config_of(family: str, layers: int) -> Any:
    """The config of a family with so many layers, without dropout and with token ids inside the vocabulary."""
    plain = {**_SIZE, **_KV, "num_hidden_layers": layers}
    gpt = {**_GPT, **_NO_DROPOUT, "n_layer": layers, "bos_token_id": 1, "eos_token_id": 1}
    opt = {**_SIZE, "num_hidden_layers": layers, "ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 64}
    opt.pop("intermediate_size")
    multipliers = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0}
    makers: dict[str, Any] = {
        "llama": lambda: hf.LlamaConfig(**plain),
        "llama-tied": lambda: hf.LlamaConfig(**plain, tie_word_embeddings=True),
        "gpt2": lambda: hf.GPT2Config(**gpt),
        "qwen3": lambda: hf.Qwen3Config(**plain, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(**plain, head_dim=8, sliding_window=4),
        "gemma3": lambda: hf.Gemma3TextConfig(**plain, head_dim=8, sliding_window=4),
        "opt": lambda: hf.OPTConfig(**opt),
        "opt-projected": lambda: hf.OPTConfig(**opt, word_embed_proj_dim=16, do_layer_norm_before=False),
        "granite": lambda: hf.GraniteConfig(**plain, **multipliers, attention_multiplier=0.2),
        "mistral": lambda: hf.MistralConfig(**plain, sliding_window=4),
        "bloom": lambda: hf.BloomConfig(
            hidden_size=32, n_head=4, vocab_size=96, n_layer=layers, hidden_dropout=0.0, attention_dropout=0.0
        ),
        "gptj": lambda: hf.GPTJConfig(**gpt, rotary_dim=4),
    }
    return makers[family]()


def build(config: Any) -> Any:
    """A float64 model of a config with random parameters, the same in every process."""
    model = hf.AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model


def token_ids(seed: int, batch: int = 2, length: int = 9) -> torch.Tensor:
    """Token ids [batch, length] that are the same in every process."""
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def sum_tied_gradients(model: torch.nn.Module) -> None:
    """As a plain loop over stages has to, before it steps."""
    for parameter in model.parameters():
        group = reduce_of(parameter).tied
        if group is not None and parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def snapshot(model: Any, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Loss and gradients, then a step, then the parameters."""
    record = {"loss": loss.clone()}
    own = {canonical_name(name, parameter): parameter for name, parameter in model.named_parameters()}
    record |= {f"grad.{name}": p.grad.clone() for name, p in own.items() if p.grad is not None}
    optimizer.step()
    record |= {f"value.{name}": parameter.detach().clone() for name, parameter in own.items()}
    return record


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
