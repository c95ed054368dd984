"""Text from an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cai_apps.data.chat.messages import USER, Conversation, Message
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.prepare import check_ids
from cai_apps.data.tokenizer import SpecialTokens, load_tokenizer, prompt_ids
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import check_weights, weight_files

if TYPE_CHECKING:
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


def generate(
    directory: Path,
    prompt: str = "def ",
    drawing: Drawing = Drawing(),
    *,
    special_tokens: SpecialTokens = "text",
    chat: bool = False,
) -> str:
    """Return the prompt with its continuation, or the answer to it.

    The prompt's ids are those of a document that begins so in training. `special_tokens` says whether control tokens
    written in it are text, or parsed.

    Args:
        directory: an export, or another HF model directory.
        prompt: the text to go on with; with `chat` a user's message, which the tokenizer's template writes.
        drawing: the way in which tokens are drawn.
        special_tokens: whether control tokens in the prompt are text, or the tokens that they spell.
        chat: whether the prompt is a message that is to be answered.

    Raises:
        ConfigError: `directory` is not an HF model directory with a tokenizer and safetensors.
        DataError: the tokenizer has ids that the model has no row for.
        CheckpointError: an index names files outside it, or the header of a file is not sound.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"not an HF model directory: {directory}", expected="the directory of an export")
    tokenizer = load_tokenizer(directory)
    if not chat:
        ids = prompt_ids(tokenizer, prompt, special_tokens)
        return continued(directory, tokenizer, ids if prompt else [], drawing)
    conversation = Conversation((Message(USER, prompt),))
    ids = Renderer(tokenizer, load_template(tokenizer, None)).question(conversation)
    return continued(directory, tokenizer, ids, drawing, only_new=True)


def continued(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    prompt: Sequence[int],
    drawing: Drawing,
    *,
    only_new: bool = False,
) -> str:
    """Return the text of a prompt's ids and those drawn after them, or of the latter alone; errors as `generate`."""
    import torch

    if 0 < drawing.temperature < COLDEST:
        raise ConfigError(
            "the temperature is too small", got=drawing.temperature, expected=f"0, or at least {COLDEST}"
        )
    if not prompt:
        raise ConfigError("the prompt is empty", expected="text of one token at least")
    ids, length = torch.tensor([prompt]), len(prompt)
    model = _model(directory)
    check_ids(ids.numpy(), model.get_input_embeddings().num_embeddings)
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length + drawing.tokens:
        raise ConfigError(
            "the prompt and its continuation are longer than the model's positions",
            got=f"{length} + {drawing.tokens} tokens",
            expected=f"at most {limit} (max_position_embeddings)",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = model.to(device).eval(), ids.to(device)
    warm = drawing.temperature > 0
    sampling = {"do_sample": True, "temperature": drawing.temperature} if warm else {"do_sample": False}
    torch.manual_seed(drawing.seed)
    with torch.inference_mode():
        if not model(input_ids=ids).logits.isfinite().all():
            raise CheckpointError(
                f"what the model of {directory} predicts is not finite",
                cause="its weights are damaged, or it was trained too fast",
                fix="export an earlier checkpoint",
            )
        options = {"max_new_tokens": drawing.tokens, "pad_token_id": tokenizer.eos_token_id, **sampling}
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return str(tokenizer.decode(ids[0, length if only_new else 0 :], skip_special_tokens=True))


def _model(directory: Path) -> Any:
    """The causal language model of a directory, whose files are sound and lack nothing."""
    from transformers import AutoModelForCausalLM

    check_weights(directory)
    weight_files(directory, error=ConfigError)
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
    if missing := sorted(loaded["missing_keys"]):
        raise CheckpointError(
            f"{directory} lacks weights of its model",
            got=", ".join(missing[:5]),
            cause="they would be random numbers",
            fix="export or download it again",
        )
    return model
