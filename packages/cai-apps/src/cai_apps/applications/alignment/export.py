"""The export of a reward model: a sequence classification of transformers, or an adapter of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from cai_apps.applications.language.task import export_hf
from cai_apps.compose.value_head import published_config
from cai_apps.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cai_apps.compose.session import Session


def export_reward_model(session: Session, directory: Path, tokenizer: Path) -> None:
    """Write the reward model of a session as `AutoModelForSequenceClassification` opens it. Collective.

    Args:
        session: the session.
        directory: the directory to write.
        tokenizer: the directory of the run's tokenizer.
    """
    padding = padding_of(load_tokenizer(tokenizer))
    if padding is None and dist.get_rank() == 0:
        print(
            "the tokenizer has no token that could fill texts up: the exported model takes one text at a time"
        )
    model: Any = session.model
    config = model.config
    model.config = published_config(config, padding)
    try:
        export_hf(session, directory, tokenizer)
    finally:
        model.config = config
    if dist.get_rank() == 0:  # by the name of transformers' class, not of the one that learned
        published_config(config, padding).save_pretrained(directory)
    dist.barrier()


def padding_of(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id that fills texts up; None: there is none.

    transformers takes the last token that is not this one: so it must not be one that ends a text.
    """
    ids = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    return next((int(number) for number in ids if number not in (None, tokenizer.eos_token_id)), None)
