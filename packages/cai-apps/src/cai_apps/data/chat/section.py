"""The section of a config that says which conversations are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cai_apps.config.ranges import FILLED
from cai_apps.data.section import Data


@dataclass(frozen=True)
class ChatData(Data):
    chat_template: Annotated[str | None, FILLED] = None
    """A file with the Jinja template that writes conversations; None: the tokenizer's own."""
    trained: tuple[str, ...] = ("all",)
    """What is trained on: "all" answers of the assistant, the "last" of each conversation, or the messages of the
    roles that are named."""
