"""Tokenizers of two families with the control tokens of a chat template."""

from __future__ import annotations

from types import SimpleNamespace

from chat_templates import Form
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cai_apps.data.chat.template import load_template

TEXTS = [
    "Hello there! So long, and be kind. It is 5. Hi, bye; user assistant system tool",
    '{"name": "add", "arguments": {"a": 2, "b": 3}}\n\n{"parameters": {"type": "object"}}',
    "\n\n<|user|>\n\n<|assistant|>\n\n[INST] a question [/INST] an answer.\n\n\nTwo twos are 4, 3+3 is 6?",
] * 9
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES = ("bytes", "trimmed bytes", "metaspace", "metaspace always")


def tokenizer_of(family: str, tokens=(), *, bos=None, eos=None, template=None, rstrip=False, adds_bos=False):
    """A small tokenizer: bytes as GPT-2's and its followers, or words with a sign for a space as sentencepiece's.

    Args:
        tokens: control tokens; those of thoughts and calls are no special tokens.
        rstrip: control tokens take the white space after them.
        adds_bos: the tokenizer puts its first token before every text, as Llama's do.
    """
    rules = Tokenizer(models.BPE(byte_fallback=family.startswith("metaspace"), unk_token=None))
    alphabet = []
    if family.startswith("metaspace"):
        scheme = "always" if family.endswith("always") else "first"
        rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        rules.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = [chr(number) for number in range(32, 127)] + ["\n", "｜", "▁"]
    else:
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        rules.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        rules.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    lines = [line for text in TEXTS for line in text.splitlines()]
    rules.train_from_iterator(lines if family.startswith("metaspace") else TEXTS, trainer)
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    for token in tokens:
        added = AddedToken(
            token, special=token not in plain, normalized=False, rstrip=rstrip and token != bos
        )
        (rules.add_tokens if token in plain else rules.add_special_tokens)([added])
    if family == "trimmed bytes":
        rules.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        rules.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, rules.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def setting(form: Form, family: str = "bytes", **options) -> SimpleNamespace:
    """A form's tokenizer and template."""
    own = {"bos": form.bos, "eos": form.eos, "template": form.template, "rstrip": form.rstrip}
    tokenizer = tokenizer_of(family, form.tokens, **{**own, **options})
    return SimpleNamespace(tokenizer=tokenizer, template=load_template(tokenizer))
