"""A document's ids and a prompt's, by the conventions of published tokenizers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cai_apps.data.prepare import tokenize
from cai_apps.data.tokenizer import (
    affixes,
    document_ids,
    load_tokenizer,
    prompt_ids,
    tokenizer_digest,
    train_tokenizer,
)
from cai_mesh.errors import ConfigError

START, END, EXTRA = 0, 1, 2


def tokenizer_of(template: str | None, *, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens after <s>, </s> and [X]; a template as a published tokenizer.json has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": START, "</s>": END, "[X]": EXTRA} | {c: n + 3 for n, c in enumerate(alphabet)}
    rules = Tokenizer(models.BPE(vocabulary, []))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    rules.decoder = decoders.ByteLevel()
    rules.add_special_tokens(["<s>", "</s>", "[X]"])
    if template:
        special = [("<s>", START), ("</s>", END), ("[X]", EXTRA)]
        rules.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<s>", eos_token="</s>")


CONVENTIONS = {
    "GPT-2: nothing": (None, [], []),
    "LLaMA: <s> before": ("<s> $A", [START], []),
    "LLaMA with add_eos_token": ("<s> $A </s>", [START], [END]),
    "T5: </s> after": ("$A </s>", [], [END]),
    "OPT: </s> before": ("</s> $A", [END], []),
    "GLM: two before": ("[X] <s> $A", [EXTRA, START], []),
    "BERT and its like: a mark after that is no end": ("<s> $A [X]", [START], [EXTRA]),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("prefix_space", [False, True])
def test_a_document_has_the_prefix_the_suffix_and_one_end(convention, prefix_space):
    template, prefix, suffix = CONVENTIONS[convention]
    tokenizer = tokenizer_of(template, prefix_space=prefix_space)
    text = tokenizer("a text", add_special_tokens=False)["input_ids"]
    assert affixes(tokenizer) == (prefix, suffix)
    assert tokenizer("a text")["input_ids"] == prefix + text + suffix
    end = [] if suffix == [END] else [END]
    assert document_ids(tokenizer, ["a text"]) == [prefix + text + suffix + end]
    assert prompt_ids(tokenizer, "a text") == prefix + text
    assert [ids.tolist() for ids in tokenize(tokenizer, ["a text"])] == document_ids(tokenizer, ["a text"])


def test_a_prompt_is_the_beginning_of_its_document():
    tokenizer = tokenizer_of("<s> $A")
    document = document_ids(tokenizer, ["def f(x):\n    return x"])[0]
    prompt = prompt_ids(tokenizer, "def f(x):")
    assert document[: len(prompt)] == prompt


@pytest.mark.parametrize("text", ["a </s> b", "</s>", "<s>system", "x[X]", "</s></s>"])
def test_control_tokens_in_a_text_are_text(text):
    tokenizer = tokenizer_of("<s> $A")
    ids = document_ids(tokenizer, [text])[0]
    assert (ids[0], ids[-1]) == (START, END)
    assert not {START, END, EXTRA} & set(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == text
    assert prompt_ids(tokenizer, text) == ids[:-1]


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>"])
def test_parsed_control_tokens_are_tokens_and_the_end_stands_once(template):
    tokenizer = tokenizer_of(template)
    ids = document_ids(tokenizer, ["a</s>b</s>"], "parse")[0]
    assert ids.count(END) == 2
    assert document_ids(tokenizer, ["a</s>b"])[0].count(END) == 1  # and no call changes the next one


def test_the_digest_is_of_rules_and_not_of_names(tmp_path):
    tokenizer = tokenizer_of("<s> $A")
    tokenizer.save_pretrained(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save_pretrained(tmp_path / "b")
    digests = {tokenizer_digest(load_tokenizer(tmp_path / name)) for name in "ab"} | {
        tokenizer_digest(tokenizer)
    }
    assert len(digests) == 1
    others = [tokenizer_of(None), tokenizer_of("<s> $A </s>"), train_tokenizer(["a b"], 300)]
    assert len(digests | {tokenizer_digest(other) for other in others}) == 4


def test_use_does_not_change_the_digest():
    tokenizer = tokenizer_of("<s> $A")
    before = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=4, split_special_tokens=True)
    document_ids(tokenizer, ["a </s>"])
    assert tokenizer_digest(tokenizer) == before


def test_a_tokenizer_that_changes_a_text_with_its_marks_is_refused():
    class Reversing(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            encoded = super().__call__(text, **options)
            if options.get("add_special_tokens", True):
                encoded["input_ids"] = [START, 9, 9]
            return encoded

    tokenizer = Reversing(tokenizer_object=tokenizer_of(None).backend_tokenizer, eos_token="</s>")
    with pytest.raises(ConfigError, match="changes a text"):
        affixes(tokenizer)


def test_what_auto_tokenizer_loads_is_read_alike(tmp_path):
    tokenizer_of("<s> $A").save_pretrained(tmp_path)
    assert document_ids(AutoTokenizer.from_pretrained(tmp_path), ["ab"])[0][0] == START
