"""The text of an answer while it grows: letters of several tokens, and texts that stop it."""

from __future__ import annotations

import pytest

from cai_apps.data.tokenizer import train_tokenizer
from cai_apps.engine.text import AnswerText

WORDS = "a stop is where one stops, and ünïcödé 🙂 is several bytes; the end is near, the end is here"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS] * 4, 290)


def written(tokenizer, text: str, stop=(), prompt: str = "so ") -> tuple[list[str], AnswerText]:
    before, ids = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
    writer, pieces = AnswerText(tokenizer, before, stop), []
    for number, token in enumerate(ids):
        writer.add(token)
        ends = number + 1 == len(ids) or writer.is_stopped
        if ends:
            writer.finish()
        pieces.append(writer.pass_on(ends=ends))
        if writer.is_stopped:
            break
    return pieces, writer


def test_pieces_make_the_text(tokenizer):
    pieces, writer = written(tokenizer, WORDS)
    assert "".join(pieces) == writer.text == WORDS
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > len(WORDS) / 4


def test_a_stop_text_is_never_passed_on_nor_what_might_begin_one(tokenizer):
    pieces, writer = written(tokenizer, WORDS, stop=["the end is n", "nothing"])
    assert writer.is_stopped and "".join(pieces) == writer.text == WORDS[: WORDS.index("the end is n")]
    pieces, writer = written(tokenizer, WORDS, stop=["the end is never"])
    assert not writer.is_stopped and "".join(pieces) == WORDS


def test_the_first_of_several_stop_texts_ends(tokenizer):
    _, writer = written(tokenizer, WORDS, stop=["stops", "stop", "where"])
    assert writer.text == "a "


def test_a_letter_that_never_ends_is_passed_on_at_the_end(tokenizer):
    ids = tokenizer("🙂")["input_ids"]
    assert len(ids) > 1
    writer = AnswerText(tokenizer, [], ())
    writer.add(ids[0])
    assert writer.pass_on(ends=False) == ""
    writer.finish()
    assert writer.pass_on(ends=True) == "\ufffd"
