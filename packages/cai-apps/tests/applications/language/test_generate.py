"""`cai generate` of a directory as the hub has it: a prompt, a file of prompts, a chat in the terminal."""

from __future__ import annotations

import io
import json

import pytest
import torch
from chat_tokenizers import tokenizer_of
from engine_toys import small_model
from transformers import AutoModelForCausalLM

from cai_apps.applications.language.conversing import converse
from cai_apps.applications.language.generate import Writer, place_of
from cai_apps.cli import main
from cai_apps.engine import LLM, Sampling

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved(home, family: str):
    """A model that was saved by transformers, with a tokenizer of its own."""
    tokens = ("<|im_start|>", "<|im_end|>")
    tokenizer = tokenizer_of(family, tokens, eos="<|im_end|>", template=TEMPLATE)
    small_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(home)
    tokenizer.save_pretrained(home)
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), "metaspace")


def continued(home, ids: list[int], tokens: int) -> str:
    """What transformers writes after ids, the likeliest token each time."""
    model = AutoModelForCausalLM.from_pretrained(home)
    prompt = torch.tensor([ids])
    whole = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens
    )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(home).decode(whole[0, len(ids) :], skip_special_tokens=True)


def test_a_prompt_and_a_message(home, capsys):
    llm = LLM(home)
    ids = llm.tokenizer("Hello there")["input_ids"]
    assert (
        main(["generate", str(home), "--prompt", "Hello there", "--temperature", "0", "--tokens", "12"]) == 0
    )
    assert capsys.readouterr().out == "Hello there" + continued(home, ids, 12) + "\n"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    written = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    asked = ["--chat", "--system", "Be kind.", "--prompt", "Hi", "--temperature", "0", "--tokens", "9"]
    assert main(["generate", str(home), *asked]) == 0
    assert capsys.readouterr().out == continued(home, written, 9) + "\n"
    (output,) = llm.chat(messages, temperature=0, max_tokens=9)
    assert list(output.prompt_token_ids) == list(written) and output.text == continued(home, written, 9)


def test_a_file_of_prompts(home, tmp_path, capsys):
    llm, file, output = LLM(home), tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    records = [
        {"prompt": "Hello there", "id": 7},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"text": "It is 5"},
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    options = ["--temperature", "0", "--tokens", "6"]
    assert main(["generate", str(home), "--prompts", str(file), "--output", str(output), *options]) == 0
    assert "3 of 3 prompts answered" in capsys.readouterr().err
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    written = llm.tokenizer.apply_chat_template(
        records[1]["messages"], add_generation_prompt=True, return_dict=False
    )
    asked = [llm.tokenizer("Hello there")["input_ids"], written, llm.tokenizer("It is 5")["input_ids"]]
    for record, ids, answer in zip(records, asked, answers, strict=True):
        assert answer == record | {"answer": continued(home, ids, 6), "ending": answer["ending"]}
    assert main(["generate", str(home), "--prompts", str(file), "--output", str(output)]) == 2
    assert "is there already" in capsys.readouterr().err
    lines = tmp_path / "prompts.txt"
    lines.write_text("Hello there\nIt is 5\n")
    assert main(["generate", str(home), "--prompts", str(lines), *options]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["answer"] for record in printed] == [answers[0]["answer"], answers[2]["answer"]]


def test_a_file_of_answers_that_was_interrupted_goes_on(home, tmp_path, capsys):
    file, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    file.write_text("".join(f"It is {hour}\n" for hour in range(5)))
    command = ["generate", str(home), "--prompts", str(file), "--output", str(output), "--tokens", "6"]
    assert main([*command, "--resume"]) == 0  # nothing has been begun
    whole = output.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for end in (0, ends[1], ends[2] + 5, ends[4]):  # in the midst of a line, too
        output.write_bytes(whole[:end])
        assert main([*command, "--resume"]) == 0
        assert output.read_bytes() == whole
    assert "has the answers to all 5 prompts" in capsys.readouterr().err
    output.write_bytes(whole[: ends[2]])
    file.write_text("".join(f"It is {hour}\n" for hour in (0, 1, 7, 3, 4)))
    assert main([*command, "--resume"]) == 2
    assert "answers.jsonl:3 answers another prompt" in capsys.readouterr().err
    assert output.read_bytes() == whole[: ends[2]]  # nothing is lost
    assert main(["generate", str(home), "--prompts", str(file), "--resume"]) == 2
    assert "an output is what a command goes on with" in capsys.readouterr().err


def test_text_that_is_read_at_once_is_that_of_the_stream(home):
    llm, questions = LLM(home), ["Hello there", "It is 5", "Ünïcode, 漢字 and \U0001f600"]
    for seed, question in enumerate(questions):
        options = {"max_tokens": 40, "seed": seed, "temperature": 1.5}
        (output,) = llm.generate(question, **options)
        assert "".join(piece.text for piece in llm.stream(question, **options)) == output.text


def test_a_chat_remembers_until_it_begins_anew(home, capsys):
    writer, sampling = Writer.of(place_of(home)), Sampling(temperature=0, max_tokens=5)
    messages = converse(writer, sampling, system="Be kind.", lines=io.StringIO("Hi\n\nSo long\n/new\nbye\n"))
    assert [message.content for message in messages[:2]] == ["Be kind.", "bye"] and len(messages) == 3
    said = capsys.readouterr().out.splitlines()
    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    template = {"add_generation_prompt": True, "return_dict": False}
    assert "\n".join(said).startswith(
        continued(home, writer.tokenizer.apply_chat_template(first, **template), 5)
    )
    assert len(writer.llm.engine.requests) == 0


def test_a_stop_text_ends_an_answer(home):
    llm = LLM(home)
    (plain,) = llm.generate("Hello there", temperature=0, max_tokens=12, ignore_eos=True)
    assert plain.answers[0].ending == "length"
    stop = plain.text[3:6]
    (output,) = llm.generate("Hello there", temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    assert output.text == plain.text[: plain.text.index(stop)] and output.answers[0].ending == "stop"
    pieces = llm.stream("Hello there", temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    assert "".join(piece.text for piece in pieces) == output.text


def test_a_kind_that_the_engine_refuses_is_computed_by_transformers(tmp_path, home, capsys):
    from transformers import AutoConfig

    options = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 600}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **options))
    model.save_pretrained(tmp_path)
    LLM(home).tokenizer.save_pretrained(tmp_path)
    writer = Writer.of(place_of(tmp_path))
    assert writer.llm is None and "bloom" in writer.refusal.lower()
    assert "transformers computes this model" in capsys.readouterr().err
    (answer,) = writer.answers([[5, 6, 7]], [Sampling(temperature=0, max_tokens=4)])
    expected = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=4)[0, 3:]
    assert list(answer.token_ids) == expected.tolist()


def test_an_answer_of_a_form(home, tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "blue"]}')
    asked = ["--chat", "--prompt", "Hi", "--tokens", "20"]
    assert main(["generate", str(home), *asked, "--regex", "[a-c]{3}"]) == 2
    assert "llguidance does not read this tokenizer" in capsys.readouterr().err
    home = saved(tmp_path / "bytes", "bytes")
    assert main(["generate", str(home), *asked, "--regex", "("]) == 2
    assert "regex is refused" in capsys.readouterr().err
    assert main(["generate", str(home), *asked, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out) in ("red", "blue")
    assert main(["generate", str(home), *asked, "--regex", "[a-c]{3}"]) == 0
    assert len(capsys.readouterr().out) == 4


def test_a_template_of_a_file_and_a_line_separator_within_a_text(home, tmp_path, capsys):
    template, file = tmp_path / "other.jinja", tmp_path / "prompts.jsonl"
    template.write_text(TEMPLATE.replace("assistant", "user"))
    llm = LLM(home)
    messages = [{"role": "user", "content": "a\u2028b"}]
    file.write_text(json.dumps({"messages": messages}, ensure_ascii=False), encoding="utf-8")
    options = ["--chat-template", str(template), "--temperature", "0", "--tokens", "4"]
    assert main(["generate", str(home), "--prompts", str(file), *options]) == 0
    ids = llm.tokenizer.apply_chat_template(
        messages, chat_template=template.read_text(), add_generation_prompt=True, return_dict=False
    )
    assert json.loads(capsys.readouterr().out)["answer"] == continued(home, ids, 4)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--json-schema", "absent.json"], "no file absent.json"),
        (["--prompts", "p.txt", "--prompt", "x"], "have none beside them"),
        (["--output", "o.jsonl"], "for the prompts of a file"),
        (["--system", "x"], "part of a chat"),
        (["--prompts", "absent.txt"], "absent.txt cannot be read"),
        (["--prompt", "x", "--temperature", "0.0001"], "too small"),
    ],
)
def test_options_that_do_not_go_together(home, options, words, capsys):
    assert main(["generate", str(home), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"prompt": "x", "answer": 1}', ":1 has what the answers are written with"),
        ("[1]", ":1 is no record"),
        ("{", ":1 is no JSON"),
        ("\n", "has no prompt"),
        ('{"question": 1}', ":1: "),
    ],
)
def test_a_line_that_is_no_prompt_is_named(home, tmp_path, text, words, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert main(["generate", str(home), "--prompts", str(file)]) == 2
    assert words in capsys.readouterr().err
