"""Chat templates in the forms of published models, written for these tests, with masks made by hand.

What a template makes of a conversation is written out as parts of a text; those in `T(...)` are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class T(str):
    """A part of a text that is trained on."""


@dataclass(frozen=True)
class Form:
    """A template with what it makes of conversations.

    Args:
        template: Jinja text.
        tokens: its control tokens.
        bos: the token that begins a text.
        eos: the token that ends an answer, as the tokenizer has it.
        cases: name -> (record, parts of the text with all answers trained on).
        rstrip: control tokens that take white space after them.
    """

    template: str
    tokens: tuple[str, ...]
    bos: str | None
    eos: str
    cases: dict[str, tuple[dict[str, Any], list[str]]] = field(default_factory=dict)
    rstrip: bool = False


def turns(*texts: str, system: str | None = None) -> dict[str, Any]:
    """A record whose messages are a user's and an assistant's in turn."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_CALL = {
    "tools": TOOLS,
    "messages": [
        {"role": "user", "content": "2 and 3?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ],
}
THINKING = turns("2+2?", "<think>\ntwo twos\n</think>\n\n4", "and 3+3?", "<think>\nthrees\n</think>\n\n6")

CHATML = Form(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    None,
    "<|im_end|>",
    {
        "two turns after a system's": (
            turns("Hi", "Hello!", "Bye", "So long.", system="Be kind."),
            ["<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
             T("Hello!<|im_end|>"), "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
             T("So long.<|im_end|>"), "\n"],
        ),
        "no system's": (
            turns("Hi", "Hello!"),
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", T("Hello!<|im_end|>"), "\n"],
        ),
        "a question after the last answer": (
            turns("Hi", "Hello!", "Bye"),
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", T("Hello!<|im_end|>"),
             "\n<|im_start|>user\nBye<|im_end|>\n"],
        ),
    },
)  # fmt: skip
LLAMA_2 = Form(
    "{% set first = 0 %}{% if messages[0].role == 'system' %}{% set first = 1 %}{% endif %}"
    "{% for m in messages[first:] %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and first %}<<SYS>>\n{{ messages[0].content }}\n"
    "<</SYS>>\n\n{% endif %}{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}"
    "{% endfor %}",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
    {
        "two turns after a system's": (
            turns("Hi", " Hello! ", "Bye", "So long.", system="Be kind."),
            ["<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]", T(" Hello! </s>"), "<s>[INST] Bye [/INST]",
             T(" So long. </s>")],
        ),
        "no system's": (turns("Hi", "Hello!"), ["<s>[INST] Hi [/INST]", T(" Hello! </s>")]),
    },
)  # fmt: skip
LLAMA_3 = Form(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ {'name': c.function.name, 'parameters': "
    "c.function.arguments} | tojson }}{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    "{# tools: {{ tools }} #}",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
    "<|eot_id|>",
    {
        "a system's": (
            turns("Hi", "Hello!", system="Be kind."),
            ["<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
             "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>\n\n", T("Hello!<|eot_id|>")],
        ),
        "a call": (
            WITH_CALL,
            ["<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 and 3?<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>\n\n",
             T('{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>'),
             "<|start_header_id|>tool<|end_header_id|>\n\n5<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>\n\n", T("It is 5.<|eot_id|>")],
        ),
    },
)  # fmt: skip
GEMMA = Form(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    "<eos>",
    {
        "two turns": (
            turns("Hi", "Hello!", "Bye", "So long."),
            ["<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", T("Hello!<end_of_turn>"),
             "\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n", T("So long.<end_of_turn>"), "\n"],
        ),
    },
)  # fmt: skip
MISTRAL = Form(
    "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m is sameas last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
     "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "<s>",
    "</s>",
    {
        "two turns": (
            turns("Hi", "Hello!", "Bye", "So long."),
            ["<s>[INST] Hi[/INST]", T(" Hello!</s>"), "[INST] Bye[/INST]", T(" So long.</s>")],
        ),
        "a call": (
            WITH_CALL,
            ["<s>[AVAILABLE_TOOLS] ["
             '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
             "[/AVAILABLE_TOOLS][INST] 2 and 3?[/INST]",
             T('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]</s>'),
             "[TOOL_RESULTS] 5[/TOOL_RESULTS]", T(" It is 5.</s>")],
        ),
    },
)  # fmt: skip
ZEPHYR = Form(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
    {
        "a system's": (
            turns("Hi", "Hello!", "Bye", "So long.", system="Be kind."),
            ["<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\n", T("Hello!</s>"),
             "\n<|user|>\nBye</s>\n<|assistant|>\n", T("So long.</s>"), "\n"],
        ),
    },
)  # fmt: skip
PHI_3 = Form(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "<s>",
    "<|endoftext|>",
    {
        "one turn": (
            turns("Hi", "Hello!"),
            ["<|user|>\nHi<|end|>\n<|assistant|>\n", T("Hello!<|end|>\n<|endoftext|>")],
        ),
    },
    rstrip=True,
)  # fmt: skip
QWEN = Form(
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    None,
    "<|im_end|>",
    {
        "a call": (
            WITH_CALL,
            ['<|im_start|>system\n{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n'
             "<|im_end|>\n<|im_start|>user\n2 and 3?<|im_end|>\n<|im_start|>assistant\n",
             T('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'),
             "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
             T("It is 5.<|im_end|>"), "\n"],
        ),
    },
)  # fmt: skip
DEEPSEEK = Form(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    {
        "a system's": (
            turns("Hi", "Hello!", "Bye", "So long.", system="Be kind."),
            ["<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi<｜Assistant｜>", T("Hello!<｜end▁of▁sentence｜>"),
             "<｜User｜>Bye<｜Assistant｜>", T("So long.<｜end▁of▁sentence｜>")],
        ),
    },
)  # fmt: skip
COMMAND_R = Form(
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}[m.role] }}"
    "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
    ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
     "<|SYSTEM_TOKEN|>"),
    "<BOS_TOKEN>",
    "<|END_OF_TURN_TOKEN|>",
    {
        "a system's": (
            turns("Hi", "Hello!", system="Be kind."),
            ["<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be kind.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
             "<|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
             T("Hello!<|END_OF_TURN_TOKEN|>")],
        ),
    },
)  # fmt: skip
GENERATION = Form(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    None,
    "<|im_end|>",
    {
        "two turns": (
            turns("Hi", "Hello!", "Bye", "So long."),
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", T("Hello!<|im_end|>\n"),
             "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", T("So long.<|im_end|>\n")],
        ),
    },
)  # fmt: skip
STRIPPING = Form(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    None,
    "<|im_end|>",
    {
        "one turn": (
            turns("2+2?", "<think>\ntwo twos\n</think>\n\n4"),
            ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
             T("<think>\ntwo twos\n</think>\n\n4<|im_end|>"), "\n"],
        ),
    },
)  # fmt: skip
STRIPPING_MARKED = Form(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}"
    "{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    None,
    "<|im_end|>",
    {
        "two turns": (
            THINKING,
            ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", T("4<|im_end|>"),
             "\n<|im_start|>user\nand 3+3?<|im_end|>\n<|im_start|>assistant\n",
             T("<think>\nthrees\n</think>\n\n6<|im_end|>"), "\n"],
        ),
    },
)  # fmt: skip
OPEN_THOUGHT = Form(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    None,
    "<|im_end|>",
)
"""The generation prompt ends within white space that goes on in the answer, as Qwen3.5's."""

FORMS = {
    "ChatML": CHATML, "Llama 2": LLAMA_2, "Llama 3": LLAMA_3, "Gemma": GEMMA, "Mistral v3": MISTRAL, "Zephyr": ZEPHYR,
    "Phi-3": PHI_3, "Qwen 2.5": QWEN, "DeepSeek": DEEPSEEK, "Command R": COMMAND_R, "generation": GENERATION,
    "stripping, last": STRIPPING, "stripping, generation": STRIPPING_MARKED,
}  # fmt: skip
CASES = [(form, case) for form in FORMS for case in FORMS[form].cases]
