"""Text from an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cai_apps.applications.language.model import initializer
from cai_apps.applications.language.weights import reader
from cai_apps.compose.adapter_files import check_adapter, check_trained_beside, load_adapter
from cai_apps.compose.expert_adapters import let_adapters_compute
from cai_apps.compose.experts_form import let_experts_compute
from cai_apps.compose.lora import add_adapters, is_adapter, learned_modules, need_peft
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import load_model_config, meta_model, pretrained_directory, read_model_config
from cai_apps.compose.quantized_base import QuantizedBase, check_quantized, codes_of
from cai_apps.config.adapters import Adapter, is_adapter_folder, read_adapter
from cai_apps.config.sections import BaseKind, LoRA
from cai_apps.data.chat.messages import USER, Conversation, Message
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.content import digest_of_weights
from cai_apps.data.prepare import check_ids
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import SpecialTokens, load_tokenizer, prompt_ids
from cai_kernels import QuantizedKind
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import check_weights, weight_files

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

COLDEST = 1e-3
"""Logits are divided by a temperature; by less they would leave the range of their dtype."""


@dataclass(frozen=True)
class Drawing:
    """The way in which tokens are drawn.

    Args:
        tokens: the most that are drawn.
        temperature: 0 always takes the likeliest.
        seed: the seed of what is drawn.
    """

    tokens: int = 64
    temperature: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """The directories of what generates.

    Args:
        model: an HF model directory.
        adapter: a folder of peft with an adapter for it; None: it has none.
        cache: the directory in which the digest of a base is kept, as `data.cache`.
        base: the form of the linear layers of the model's blocks; "compute": the dtype of its files.
    """

    model: Path
    adapter: Path | None = None
    cache: str = Data().cache
    base: BaseKind = "compute"

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer: an adapter may have been trained with another than its base's."""
        has_own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.adapter if has_own and self.adapter is not None else self.model


def place_of(
    directory: Path, adapter: Path | None = None, cache: str = Data().cache, base: BaseKind = "compute"
) -> Place:
    """Return the model of a directory; of one with an adapter alone its base, by the name that the adapter has for it.

    Args:
        directory: an export, another HF model directory, or a folder of peft.
        adapter: a folder of peft with an adapter for the model.
        cache: the directory in which the digest of a base is kept.
        base: the form of the linear layers of its blocks.

    Raises:
        ConfigError: there is neither a model nor an adapter, or there are two adapters, or the base is not there.
    """
    if (directory / "config.json").is_file():
        return Place(directory, adapter, cache, base)
    if not is_adapter_folder(directory):
        raise ConfigError(
            f"not an HF model directory: {directory}", expected="the directory of an export, or of an adapter"
        )
    if adapter is not None:
        raise ConfigError(
            f"{directory} is an adapter itself",
            got=f"--adapter {adapter}",
            fix="name the base, or leave --adapter out",
        )
    name = read_adapter(directory).base
    if not name:
        raise ConfigError(
            f"the adapter at {directory} does not say beside which model it was trained",
            fix="cai generate MODEL --adapter " + str(directory),
        )
    return Place(pretrained_directory(name), directory, cache, base)


def generate(
    directory: Path,
    prompt: str = "def ",
    drawing: Drawing = Drawing(),
    *,
    adapter: Path | None = None,
    special_tokens: SpecialTokens = "text",
    chat: bool = False,
    cache: str = Data().cache,
    base: BaseKind = "compute",
) -> str:
    """Return the prompt with its continuation, or the answer to it.

    The prompt's ids are those of a document that begins so in training. `special_tokens` says whether control tokens
    written in it are text, or parsed.

    Args:
        directory: an export, another HF model directory, or a folder of peft with an adapter.
        prompt: the text to go on with; with `chat` a user's message, which the tokenizer's template writes.
        drawing: the way in which tokens are drawn.
        adapter: a folder of peft with an adapter for the model.
        special_tokens: whether control tokens in the prompt are text, or the tokens that they spell.
        chat: whether the prompt is a message that is to be answered.
        cache: the directory in which the digest of an adapter's base is kept.
        base: the form of the linear layers of the model's blocks: "nf4" and "int8" as training has them.

    Raises:
        ConfigError: `directory` is not an HF model directory with a tokenizer and safetensors, or the adapter is of
            another model.
        DataError: the tokenizer has ids that the model has no row for.
        CheckpointError: an index names files outside it, or the header of a file is not sound.
    """
    place = place_of(directory, adapter, cache, base)
    tokenizer = load_tokenizer(place.tokenizer)
    if not chat:
        ids = prompt_ids(tokenizer, prompt, special_tokens)
        return continued(place, tokenizer, ids if prompt else [], drawing)
    conversation = Conversation((Message(USER, prompt),))
    ids = Renderer(tokenizer, load_template(tokenizer, None)).question(conversation)
    return continued(place, tokenizer, ids, drawing, only_new=True)


def continued(
    place: Place,
    tokenizer: PreTrainedTokenizerFast,
    prompt: Sequence[int],
    drawing: Drawing,
    *,
    only_new: bool = False,
) -> str:
    """Return the text of a prompt's ids and those drawn after them, or of the latter alone; errors as `generate`."""
    if 0 < drawing.temperature < COLDEST:
        raise ConfigError(
            "the temperature is too small", got=drawing.temperature, expected=f"0, or at least {COLDEST}"
        )
    if not prompt:
        raise ConfigError("the prompt is empty", expected="text of one token at least")
    ids, length = torch.tensor([prompt]), len(prompt)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model(place, device)
    check_ids(ids.numpy(), model.get_input_embeddings().num_embeddings)
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length + drawing.tokens:
        raise ConfigError(
            "the prompt and its continuation are longer than the model's positions",
            got=f"{length} + {drawing.tokens} tokens",
            expected=f"at most {limit} (max_position_embeddings)",
        )
    model, ids = model.to(device).eval(), ids.to(device)
    warm = drawing.temperature > 0
    sampling = {"do_sample": True, "temperature": drawing.temperature} if warm else {"do_sample": False}
    torch.manual_seed(drawing.seed)
    with torch.inference_mode():
        if not model(input_ids=ids).logits.isfinite().all():
            raise CheckpointError(
                f"what the model of {place.adapter or place.model} predicts is not finite",
                cause="its weights are damaged, or it was trained too fast",
                fix="export an earlier checkpoint",
            )
        options = {"max_new_tokens": drawing.tokens, "pad_token_id": tokenizer.eos_token_id, **sampling}
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return str(tokenizer.decode(ids[0, length if only_new else 0 :], skip_special_tokens=True))


def _model(place: Place, device: torch.device) -> Any:
    """The causal language model of a place, whose files are sound and lack nothing; one in codes is on the device."""
    directory, adapter = place.model, None if place.adapter is None else read_adapter(place.adapter)
    if adapter is not None:
        need_peft()
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
    if place.base != "compute":
        return _quantized(place, place.base, adapter, device)
    model = _opened(directory)
    if adapter is not None:
        _adapt(model, adapter, place)
        load_adapter(model, adapter.directory)
    return model


def _opened(directory: Path) -> Any:
    """The model of a directory as transformers opens it."""
    from transformers import AutoModelForCausalLM

    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            directory, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory} holds no causal language model, or the weights of another one",
            cause=(str(error).splitlines() or [""])[0],
            fix="check that config.json is the one these weights were made with",
        ) from None
    model, loaded = read
    let_experts_compute(model, model.dtype)
    if missing := sorted(loaded["missing_keys"]):
        raise CheckpointError(
            f"{directory} lacks weights of its model",
            got=", ".join(missing[:5]),
            cause="they would be random numbers",
            fix="export or download it again",
        )
    return model


def _quantized(place: Place, kind: QuantizedKind, adapter: Adapter | None, device: torch.device) -> Any:
    """The model of a place with the linear layers of its blocks in codes, made block by block on a device."""
    from transformers import GenerationConfig

    config = load_model_config(str(place.model))
    model = meta_model(config).requires_grad_(False)
    if adapter is not None:
        _adapt(model, adapter, place)
    check_quantized(model, kind)
    read = reader(str(place.model), lambda: place.model)
    materialize(
        model,
        initializer,
        seed=0,
        dtype=getattr(config, "dtype", None) or torch.bfloat16,
        device=device,
        pretrained=True,
        finished=QuantizedBase(kind, read).filler(model),
    )
    codes = codes_of(model)
    read(model, lambda name: name not in codes and not is_adapter(name))
    if adapter is not None:
        load_adapter(model, adapter.directory)
    if (place.model / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(place.model)
    return model


def _adapt(model: nn.Module, adapter: Adapter, place: Place) -> None:
    """Put the layers of an adapter into a model, in place; their values are read by `load_adapter`."""
    digest = None
    if adapter.base_digest is not None:
        digest = digest_of_weights({"": place.model}, place.cache)
    check_trained_beside(adapter, str(place.model), digest)
    lora = LoRA(rank=adapter.rank, alpha=adapter.alpha, rank_stabilized=adapter.rank_stabilized)
    add_adapters(model, lora, adapter.targets, learned_modules(model, adapter.modules))
    check_adapter(adapter, model)
    let_adapters_compute(model)
