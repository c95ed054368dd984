"""A small model of the same kind, on which transforms try themselves before they change a model.

`Trial` is brought by the caller. `shrunk` makes one of a transformers model: values of its config that only set the
size become small; those that set what it computes, the number of layers among them, stay.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cai_mesh.attention import NAME as ROUTED
from cai_mesh.errors import PlanError
from cai_mesh.trial.inputs import documents, encoder_states, forms_of, parts_of, small_inputs
from cai_mesh.trial.instance import AdapterChange, Change, changes_of


@dataclass(frozen=True)
class Trial:
    """A small model for `split(..., trial=)` and `parallelize(..., trial=)`, for models that are not of transformers.

    Its modules must have the names of the large model's; sizes and the number of layers may be small. It is run in
    float64 on the CPU.

    Args:
        build: a small instance, with the same values at every call.
        inputs: keyword arguments of its forward, floating-point tensors in float64; the same at every call.
        loss: a scalar of what the forward returns, which depends on all parameters.
        layers: name of the `nn.ModuleList` of layers between which the model is split. A layer gets the hidden states
            as its first argument or as `hidden_states`, and returns them, alone or first in a tuple. Of an
            encoder-decoder the encoder's list and the decoder's. Only `split` needs it.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    loss: Callable[[Any], torch.Tensor]
    layers: str | tuple[str, str] = ""


LAYERS = 8
"""Layers of a model that cannot be made narrow; others keep all of theirs."""
HEADS = 4
HEAD_WIDTH = 8
VOCABULARY = 64
PARAMETER_LIMIT = 20_000_000

_HEADS = ("encoder_attention_heads", "decoder_attention_heads")
_SMALL = {
    "intermediate_size": 24,
    "ffn_dim": 24,
    "n_inner": 24,
    "d_ff": 24,
    "d_kv": 8,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "keep_window_size": 4,
    "rotary_dim": 4,
    "mamba_chunk_size": 8,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}


@dataclass(frozen=True)
class SmallModel:
    """A `Trial` made of a model class and a small config. Two are equal when class and all config values are equal.

    Args:
        labelled: it is given labels, and its loss is its own.
        crossed: a decoder is given the hidden states of an encoder, which its cross-attention reads.
        changes: differences of the large model from its class.
    """

    model_class: type[nn.Module]
    values: str
    attention: str
    layers: str | tuple[str, str]
    config: Any = field(compare=False, repr=False)
    labelled: bool = True
    crossed: bool = False
    form: int = 0
    changes: tuple[Change, ...] = ()

    def build(self) -> nn.Module:
        """A new instance: float64, on the CPU, in evaluation mode, every parameter random (norm weights too)."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = self.model_class(copy.deepcopy(self.config)).double().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2, generator=generator).requires_grad_(True)
        for change in self.changes:
            change.apply(model)
        return model

    def without_adapters(self) -> SmallModel:
        """The same without adapters beside its layers."""
        changes = (change for change in self.changes if not isinstance(change, AdapterChange))
        return replace(self, changes=tuple(changes))

    def loss(self, output: Any) -> torch.Tensor:
        """The loss that the model computes from its labels; without labels one that depends on all it returns."""
        if self.labelled:
            return output.loss
        flat = torch.cat([t.flatten() for t in tensors_of(output).values()])
        return (flat * torch.linspace(-1.0, 1.0, flat.numel(), dtype=flat.dtype)).sum()

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of its forward, see `small_inputs`: for text ids, attention mask and labels, all [2, 12].

        A model whose attention goes by a rule gets rows of several documents in place of a mask.
        """
        words = getattr(self.config.get_text_config(), "vocab_size", None) or VOCABULARY
        words = min(words, VOCABULARY)
        inputs = small_inputs(self.model_class, self.config, words, labelled=self.labelled, form=self.form)
        if self.attention == ROUTED and inputs.pop("attention_mask", None) is not None:
            inputs |= documents()
        return inputs | (encoder_states(self.config) if self.crossed else {})


def tensors_of(output: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """The floating-point tensors in what a model returns, by where they are: in mappings, tuples and lists."""
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    tensors: dict[str, torch.Tensor] = {}
    pairs = (
        output.items()
        if isinstance(output, Mapping)
        else enumerate(output)
        if isinstance(output, tuple | list)
        else ()
    )
    for key, value in pairs:
        tensors |= tensors_of(value, f"{name}.{key}")
    return tensors


def arguments_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments: the inputs, and no cache unless they ask for one."""
    cache = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    return cache | dict(inputs)


def shrunk(
    model: nn.Module,
    layers: str | tuple[str, str] = "",
    *,
    labelled: bool = True,
    crossed: bool = False,
    heads: int = HEADS,
) -> SmallModel:
    """A small version of a model of transformers.

    A narrow config is tried first: of its parts, those that are as wide as the text, which may be joined without a
    layer that changes the width; then the text alone. If the class refuses them, one that only has a smaller
    vocabulary, then one with fewer layers too, one of which every part is narrow, one with thin and short stages, and
    one that is narrow with fewer layers; each with all forms that its main input may have.

    Args:
        layers: name of its list of layers, or of both of an encoder-decoder.
        labelled, crossed: see `SmallModel`.
        heads: heads of the small model's attention, where a narrow config is taken.

    Raises PlanError when `model` has no config, or no small instance can be built.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise PlanError(
            f"there is no small {type(model).__name__} to try",
            got="a module without a transformers config",
            expected="a model of transformers >= 5, or trial=Trial(...)",
        )
    failure: Exception | None = None
    for shrink in SHRINKS:
        try:
            small = replace(_small(model, _shrink(config, shrink, heads), layers, labelled), crossed=crossed)
            if _parameter_count(small) <= PARAMETER_LIMIT:
                tried = _tried(small)
                break
        except Exception as error:
            failure = failure or error
    else:
        raise PlanError(
            f"there is no small {type(model).__name__} to try",
            got=f"{type(failure).__name__}: {failure}" if failure else f"over {PARAMETER_LIMIT:,} parameters",
            cause="its config ties sizes together in a way that is not known here",
            fix="pass trial=Trial(...)",
        ) from failure
    return _changed(tried, model)


def _changed(small: SmallModel, model: nn.Module) -> SmallModel:
    """`small` with what this instance has beside its class. Raises `PlanError` where it does not run so."""
    changes = changes_of(model)
    if not changes:
        return small
    changed = replace(small, changes=changes)
    try:
        changed.loss(changed.build()(**arguments_of(model, changed.inputs())))
    except PlanError:
        raise
    except Exception as error:
        raise changes[0].refusal(f"{type(error).__name__}: {error}") from error
    return changed


def _small(model: nn.Module, config: Any, layers: str | tuple[str, str], labelled: bool) -> SmallModel:
    values = config.to_json_string(use_diff=False)
    return SmallModel(type(model), values, config._attn_implementation, layers, config, labelled)


@functools.lru_cache(maxsize=32)
def _tried(small: SmallModel) -> SmallModel:
    """`small` with the first form of inputs with which it runs, and its loss and gradients are numbers.

    Kept by class and config: the stages of a pipeline, of which a plan makes each, have one small model.
    """
    failure: Exception = ValueError("its loss or its gradients are not finite")
    for form in range(len(forms_of(small.model_class, small.config))):
        tried = replace(small, form=form)
        try:
            if _is_finite(tried):
                return tried
        except Exception as error:
            failure = error
    raise failure


def _is_finite(small: SmallModel) -> bool:
    """Whether loss and gradients are numbers; of a model that has no gradients the loss alone counts."""
    model = small.build()
    with torch.enable_grad(), torch.device("cpu"):
        loss = small.loss(model(**arguments_of(model, small.inputs())))
        with contextlib.suppress(RuntimeError):
            loss.backward()
    numbers = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    return all(bool(number.isfinite().all()) for number in numbers)


@functools.lru_cache(maxsize=32)
def _parameter_count(small: SmallModel) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in small.model_class(copy.deepcopy(small.config)).parameters())


def _shrink(config: Any, shrink: Callable[[Any, int], None], heads: int) -> Any:
    small = copy.deepcopy(config)
    shrink(small, heads)
    text = small.get_text_config()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(text, name, None)
        if not isinstance(value, int) or value >= VOCABULARY:
            setattr(text, name, None)
    if (getattr(text, "decoder_start_token_id", None) or 0) >= VOCABULARY:
        text.decoder_start_token_id = 1
    if getattr(small, "_experts_implementation", None) is not None:
        small._experts_implementation = "eager"
    if small._attn_implementation not in ("eager", "sdpa", ROUTED):
        small._attn_implementation = "sdpa"
    return small


def _smaller_vocabulary(config: Any, heads: int) -> None:
    text = config.get_text_config()
    if hasattr(text, "vocab_size"):
        text.vocab_size = min(text.vocab_size, VOCABULARY)


def _fewer_layers(config: Any, heads: int) -> None:
    _smaller_vocabulary(config, heads)
    text = config.get_text_config()
    before = text.num_hidden_layers
    after = min(before, LAYERS)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:after])
    text.num_hidden_layers = after


def _narrower_alike(config: Any, heads: int) -> None:
    text = config.get_text_config()
    width = text.hidden_size
    for part in [text, *(part for part in parts_of(config) if part is not text and _has_heads(part))]:
        if part.hidden_size == width:
            _narrower(part, heads)


def _narrower_text(config: Any, heads: int) -> None:
    _narrower(config.get_text_config(), heads)


def _narrower_parts(config: Any, heads: int) -> None:
    for part in filter(_has_heads, parts_of(config)):
        _narrower(part, heads)


def _narrower_and_fewer(config: Any, heads: int) -> None:
    """Narrow, and with fewer layers: of a kind whose heads, or states, have sizes that stay."""
    _narrower(config.get_text_config(), heads)
    _fewer_layers(config, heads)


def _thinner_stages(config: Any, heads: int) -> None:
    """Stages of widths that grow: each a quarter as wide, and of two blocks."""
    for part in parts_of(config):
        if isinstance(getattr(part, "embed_dim", None), int):
            part.embed_dim //= 4
        for name, smaller in (("hidden_sizes", lambda v: v // 4), ("depths", lambda v: min(v, 2))):
            sizes = getattr(part, name, None)
            if isinstance(sizes, list | tuple):
                setattr(part, name, type(sizes)(map(smaller, sizes)))


def _has_heads(config: Any) -> bool:
    return bool(getattr(config, "hidden_size", None) and getattr(config, "num_attention_heads", None))


def _narrower(text: Any, heads: int) -> None:
    width, own_heads, hidden = text.hidden_size, text.num_attention_heads, heads * HEAD_WIDTH
    if getattr(text, "word_embed_proj_dim", None) is not None:
        text.word_embed_proj_dim = hidden if text.word_embed_proj_dim == width else hidden // 2
    fewer = next(n for n in range(heads - 1, 0, -1) if heads % n == 0)
    for name in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = getattr(text, name, None)
        if kv_heads is not None:
            setattr(text, name, heads if kv_heads == own_heads else 1 if kv_heads == 1 else fewer)
    latent_attention = hasattr(text, "qk_rope_head_dim")
    if vars(text).get("head_dim") is not None and not latent_attention:
        text.head_dim = HEAD_WIDTH
    text.hidden_size, text.num_attention_heads = hidden, heads
    for name, value in _SMALL.items():
        now = getattr(text, name, None)
        if isinstance(now, int):
            setattr(text, name, min(now, value))
    for name in _HEADS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, heads)
    patch = getattr(text, "patch_size", None)
    if isinstance(patch, int) and isinstance(getattr(text, "image_size", None), int):
        text.image_size = min(text.image_size, 4 * patch)


SHRINKS = (
    _narrower_alike,
    _narrower_text,
    _smaller_vocabulary,
    _fewer_layers,
    _narrower_parts,
    _thinner_stages,
    _narrower_and_fewer,
)
"""Ways to make a config small, the first that a class takes counts."""
