"""Text from an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cai_apps.data.prepare import check_ids
from cai_apps.data.tokenizer import SpecialTokens, load_tokenizer, prompt_ids
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import check_weights, weight_files

COLDEST = 1e-3
"""Logits are divided by a temperature; by less they would leave the range of their dtype."""


def generate(
    directory: Path,
    prompt: str = "def ",
    *,
    tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    special_tokens: SpecialTokens = "text",
) -> str:
    """The prompt continued by up to `tokens` tokens; a temperature of 0 always takes the likeliest.

    The prompt's ids are those of a document that begins so in training. `special_tokens` says whether control tokens
    written in it are text, or parsed.

    Raises:
        ConfigError: `directory` is not an HF model directory with a tokenizer and safetensors.
        DataError: the tokenizer has ids that the model has no row for.
        CheckpointError: an index names files outside it, or the header of a file is not sound.
    """
    import torch

    if 0 < temperature < COLDEST:
        raise ConfigError(
            "the temperature is too small", got=temperature, expected=f"0, or at least {COLDEST}"
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(f"not an HF model directory: {directory}", expected="the directory of an export")
    tokenizer = load_tokenizer(directory)
    ids = torch.tensor([prompt_ids(tokenizer, prompt, special_tokens)])
    length = ids.shape[1]
    if not prompt or not length:
        raise ConfigError("the prompt is empty", got=repr(prompt), expected="text of one token at least")
    model = _model(directory)
    check_ids(ids.numpy(), model.get_input_embeddings().num_embeddings)
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length + tokens:
        raise ConfigError(
            "the prompt and its continuation are longer than the model's positions",
            got=f"{length} + {tokens} tokens",
            expected=f"at most {limit} (max_position_embeddings)",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = model.to(device).eval(), ids.to(device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    torch.manual_seed(seed)
    with torch.inference_mode():
        if not model(input_ids=ids).logits.isfinite().all():
            raise CheckpointError(
                f"what the model of {directory} predicts is not finite",
                cause="its weights are damaged, or it was trained too fast",
                fix="export an earlier checkpoint",
            )
        options = {"max_new_tokens": tokens, "pad_token_id": tokenizer.eos_token_id, **sampling}
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


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
