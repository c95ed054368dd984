"""Prompts of a config as ids: texts as documents begin, messages as the chat template asks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from chat_templates import CHATML, turns
from chat_tokenizers import setting

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.prompts import Prompts, ids_of
from cai_apps.config.sections import Train
from cai_apps.data.chat.prepare import prepare_chat
from cai_apps.data.document_rows import split_documents
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer, prompt_ids
from cai_mesh.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    setting(CHATML).tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps(turns("Hi", "Hello!")))
    places = {name: str(tmp_path / name) for name in ("model", "cache", "chats.jsonl")}
    data = Data(source=places["chats.jsonl"], tokenizer=places["model"], cache=places["cache"], format="chat")
    config = replace(Config(), data=replace(data, sequence_length=40), train=Train(microbatch_size=1))
    return replace(config, log=replace(config.log, prompts=("Hi", "bye", "Hi"), sample_tokens=5))


def test_a_message_is_written_as_the_template_asks(config):
    tokenizer = load_tokenizer(config.data.tokenizer)
    found = ids_of(config, tokenizer)
    assert list(found) == ["Hi", "bye"], "the same prompt once"
    for text, ids in found.items():
        message = [{"role": "user", "content": text}]
        theirs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert ids == theirs


def test_a_text_is_written_as_a_document_begins(config):
    config = replace(config, data=replace(config.data, format="text"))
    tokenizer = load_tokenizer(config.data.tokenizer)
    assert ids_of(config, tokenizer)["bye"] == prompt_ids(tokenizer, "bye")


@pytest.mark.parametrize(
    ("format", "prompt"), [("text", ""), ("text", "So long, " * 20), ("chat", "So long, " * 20)]
)
def test_a_prompt_that_leaves_no_room_is_refused(config, format, prompt):
    config = replace(
        config, data=replace(config.data, format=format), log=replace(config.log, prompts=(prompt,))
    )
    with pytest.raises(
        ConfigError, match=r"(?s)log\.prompts.*sequence_length = 40 less log.sample_tokens = 5"
    ):
        ids_of(config, load_tokenizer(config.data.tokenizer))


def test_an_answer_ends_at_the_token_that_ends_those_it_learns(config):
    documents = prepare_chat(config.data, 600)
    tokenizer = load_tokenizer(documents.tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    samples, _ = split_documents(documents, 40, 0.0)
    prompts = Prompts.of(config, tokenizer, documents, samples)
    assert end in prompts.ends and tokenizer.eos_token_id in prompts.ends

    class Session:
        """Says "bye" and then the end, to the first prompt; goes on with the second."""

        def __init__(self):
            self.config, self.runner, self.mesh = config, self, None
            self.device, self.rows = torch.device("cpu"), []

        def predict(self, batch):
            self.rows.append({name: value.clone() for name, value in batch.items()})
            places = torch.full_like(batch["input_ids"], end if len(self.rows) % 2 == 0 else 7)
            return places if len(self.rows) <= 2 else torch.full_like(places, 7)

    session = Session()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cai_apps.applications.language.prompts._first_rank", lambda session, ids: ids)
        texts = prompts.continued(session)  # type: ignore[arg-type]
    assert len(session.rows) == 2 + 5
    assert texts == {"Hi": tokenizer.decode([7]), "bye": tokenizer.decode([7] * 5)}
    row = session.rows[0]
    assert row["cu_seqlens"].tolist()[0][0] == 0 and set(row["cu_seqlens"].tolist()[0][1:]) == {40}
    assert torch.equal(row["position_ids"], torch.arange(40)[None])
    length = len(prompts.ids[0])
    assert row["input_ids"][0, :length].tolist() == prompts.ids[0]
    assert int(session.rows[1]["input_ids"][0, length]) == 7
