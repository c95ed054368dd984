"""Templates in the forms of published models: ids of the whole text, and masks made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from chat_templates import CASES, FORMS, Form, T
from chat_tokenizers import FAMILIES, tokenizer_of

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template


def setting(form: Form, family: str = "bytes", **options) -> SimpleNamespace:
    tokenizer = tokenizer_of(
        family, form.tokens, bos=form.bos, eos=form.eos, template=form.template, rstrip=form.rstrip, **options
    )
    return SimpleNamespace(tokenizer=tokenizer, template=load_template(tokenizer))


def by_hand(parts: list[str]) -> list[tuple[str, bool]]:
    return [(str(part), isinstance(part, T)) for part in parts]


def joined(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [piece for piece in pieces if piece[0]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("form", "case"), CASES)
def test_the_mask_is_the_one_made_by_hand(form: str, case: str, family: str):
    its = setting(FORMS[form], family)
    record, parts = FORMS[form].cases[case]
    conversation = read_conversation(record)
    example, pieces = Renderer(its.tokenizer, its.template).pieces(conversation)
    assert joined(pieces) == by_hand(parts)
    whole = "".join(parts)
    assert example.ids.tolist() == its.tokenizer(whole, add_special_tokens=False)["input_ids"]
    own = its.tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=False)
    assert example.ids.tolist() == own
    assert len(example.trained) == len(example.ids) and example.trained.dtype == np.bool_
