"""Templates in the forms of published models: ids of the whole text, and masks made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from chat_templates import CASES, FORMS, GENERATION, STRIPPING_MARKED, T
from chat_tokenizers import FAMILIES, setting

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Renderer, render


def by_hand(parts: list[str]) -> list[tuple[str, bool]]:
    return [(str(part), isinstance(part, T)) for part in parts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("form", "case"), CASES)
def test_the_mask_is_the_one_made_by_hand(form: str, case: str, family: str):
    its = setting(FORMS[form], family)
    record, parts = FORMS[form].cases[case]
    conversation = read_conversation(record)
    example, pieces = Renderer(its.tokenizer, its.template).pieces(conversation)
    assert [piece for piece in pieces if piece[0]] == by_hand(parts)
    whole = "".join(parts)
    assert example.ids.tolist() == its.tokenizer(whole, add_special_tokens=False)["input_ids"]
    own = its.tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=False)
    assert example.ids.tolist() == own
    assert len(example.trained) == len(example.ids) and example.trained.dtype == np.bool_


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("form", "case"), CASES)
def test_what_comes_before_the_last_answer_is_what_the_model_is_given(form: str, case: str, family: str):
    its = setting(FORMS[form], family)
    record, _ = FORMS[form].cases[case]
    example = render(its.tokenizer, its.template, read_conversation(record), ("last",))
    first = int(np.flatnonzero(example.trained)[0])
    messages = record["messages"][:]
    while messages.pop()["role"] != "assistant":
        pass
    options = {"tools": record.get("tools"), "add_generation_prompt": True, "return_dict": False}
    assert example.ids[:first].tolist() == its.tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize("form", [GENERATION, STRIPPING_MARKED])
@pytest.mark.parametrize(
    "family", FAMILIES[:1] + FAMILIES[2:]
)  # with trimmed offsets transformers' mask is another
def test_generation_is_as_transformers_reads_it(form, family):
    its = setting(form, family)
    for record, _ in form.cases.values():
        example = render(its.tokenizer, its.template, read_conversation(record))
        options = {"return_assistant_tokens_mask": True, "return_dict": True}
        encoding = its.tokenizer.apply_chat_template(record["messages"], **options)
        assert example.trained.tolist() == [bool(mark) for mark in encoding["assistant_masks"]]
