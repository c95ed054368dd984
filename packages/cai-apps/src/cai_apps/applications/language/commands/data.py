"""cai data check|stats FILE [--tokenizer DIR|hub id] [--chat_template FILE] [--trained all|last|ROLES] [--json]"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED
from cai_apps.config.terminal import printable, terminal
from cai_apps.run.exit_codes import FAILURE
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cai_apps.data.chat.check import Findings, Sample
    from cai_apps.data.chat.render import Renderer

LIKE_TRAINING = {"--model.name": "--tokenizer", "--data.": "--"}
"""Flags of `cai train`, by their beginnings, that are understood here, too."""
PART, BEGINNING = 1200, 800
"""Letters of a part of a conversation that are shown, and of its beginning where it is longer."""
MARKS = {"+": ("{+", "+}"), "-": ("{-", "-}")}
"""Signs around trained text and around answers that are not preferred, where there are no colours."""
LONGEST_ROW = 10**9
"""Tokenizers that know no limit of their model say a larger number."""
COLOURS = {"+": "green", "-": "red"}
LEGENDS = {
    "conversations": "trained on: {}",
    "pairs": "the prompt, chosen {}, rejected {}",
    "judged": "desirable {}, not desirable {}",
}
"""The words after a record's place, by the kind of records."""


@dataclass(frozen=True)
class Arguments:
    """Look through data before they are trained on. check, of conversations or preferences (pairs of answers, or judged
    ones): three as the model reads them, what is trained on in colour, how long they are, and every line that is
    broken. stats, of text: how much there is, how long documents are, what is longer than a row, what comes twice. The
    flags of `cai train` (--model.name, --data.chat_template ...) are understood, too."""

    action: Annotated[Literal["check", "stats"], tyro.conf.Positional]
    """check: conversations and preferences, record by record. stats: documents of text, counted."""
    source: Annotated[str, tyro.conf.Positional, FILLED]
    """A file of text or of records, a folder or a glob of them, or a directory written by datasets.save_to_disk."""
    more_sources: Annotated[tuple[str, ...], FILLED] = ()
    """Further sources of text, for stats."""
    text_column: Annotated[str, FILLED] = "text"
    """The field or column that holds the text of a document, for stats."""
    tokenizer: Annotated[str | None, FILLED] = None
    """A model's directory or hub id, or a run with an export; None: only the form of the lines is looked at."""
    chat_template: Annotated[str | None, FILLED] = None
    """A file with the Jinja template that writes conversations; None: the tokenizer's own."""
    trained: tuple[str, ...] = ("all",)
    """What is trained on: "all" answers, the "last" of each conversation, or the messages of the roles named."""
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens that a message spells, such as </s>: 'text' like any other, or 'parse' them."""
    sequence_length: Annotated[int | None, COUNT] = None
    """Tokens at which a conversation is cut, and beyond which a pair or a judged answer is left out; None: none is. Of
    text the length of a row; None: that of the tokenizer's model."""
    json: bool = False
    """Print one JSON object: of check "kind", "records", "duplicates", "lengths", "problems"; of stats the numbers; an
    error is one with "error"."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, [_flag(argument) for argument in arguments], command="data")
    _refuse_others(options)
    if options.action == "stats":
        return _measure(options)
    from cai_apps.data.preference.check import check_any

    tokenizer, renderer = _renderer(options)
    findings = check_any(options.source, renderer, options.sequence_length, options.trained)
    if options.json:
        print(json.dumps(_facts(findings)))
    else:
        _show(findings, tokenizer)
    return FAILURE if findings.problems else 0


OF_ONE = {
    "check": ("more_sources", "text_column"),
    "stats": ("chat_template", "trained"),
}
"""Options that an action does not have, by its name."""


def _refuse_others(options: Arguments) -> None:
    """Raise ConfigError where an option of the other action is set."""
    defaults = {field.name: field.default for field in fields(Arguments)}
    for name in OF_ONE[options.action]:
        if getattr(options, name) != defaults[name]:
            raise ConfigError(
                f"`cai data {options.action}` has no option --{name.replace('_', '-')}",
                got=str(getattr(options, name)),
                fix="leave it out" if options.action == "stats" else "look at one source at a time",
            )


def _measure(options: Arguments) -> int:
    """Print the statistics of text."""
    from cai_apps.data.sources import entries
    from cai_apps.data.statistics import measure
    from cai_apps.data.tokenizer import document_ids, load_tokenizer

    ids, length = None, options.sequence_length
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(_place(options.tokenizer))
        ids = partial(document_ids, tokenizer, special_tokens=options.special_tokens)
        if length is None and tokenizer.model_max_length < LONGEST_ROW:
            length = tokenizer.model_max_length
    texts = entries(options.source, *options.more_sources, column=options.text_column)
    statistics = measure(texts, ids, length)
    if options.json:
        print(json.dumps(statistics.facts()))
        return 0
    for place, text in statistics.first:
        print(f"{printable(place)}\n{printable(text)}\n")
    print("\n".join(statistics.lines()))
    if ids is None:
        print("lengths are those in characters; --tokenizer MODEL counts tokens")
    return 0


def _place(name: str) -> str | Path:
    """Return the directory of a tokenizer: of a run its export, else what was named."""
    run_directory = RunDirectory(Path(name).expanduser())
    return run_directory.export if run_directory.config_file.is_file() else name


def _flag(argument: str) -> str:
    """Return a flag of `cai train` as it is called here."""
    for beginning, name in LIKE_TRAINING.items():
        if argument.startswith(beginning):
            return name + argument.removeprefix(beginning)
    return argument


def _renderer(options: Arguments) -> tuple[PreTrainedTokenizerFast | None, Renderer | None]:
    if options.tokenizer is None:
        return None, None
    from cai_apps.data.chat.render import Renderer
    from cai_apps.data.chat.template import load_template
    from cai_apps.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(_place(options.tokenizer))
    template = load_template(tokenizer, options.chat_template)
    return tokenizer, Renderer(tokenizer, template, options.trained, options.special_tokens)


def _facts(findings: Findings) -> dict[str, object]:
    return {
        "kind": findings.kind,
        "records": findings.count,
        "duplicates": findings.repeats.count,
        "lengths": None if findings.lengths is None else findings.lengths.facts(),
        "problems": [str(error) for error in findings.problems],
    }


def _show(findings: Findings, tokenizer: PreTrainedTokenizerFast | None) -> None:
    for sample in findings.samples:
        _show_sample(sample, LEGENDS[findings.kind])
    if findings.lengths is None:
        print("only the form of records was looked at; --tokenizer MODEL shows them as the model reads them")
    elif findings.ends:
        print("\n".join(findings.lengths.lines()))
        print(_ends(findings, tokenizer))
    for error in findings.problems:
        print(f"\n{error}")
    broken = len(findings.problems)
    if findings.repeats.count:
        print(f"{findings.repeats.count:,} records have the content of one before them")
    print(
        f"\n{findings.count:,} records, {broken:,} broken"
        if broken
        else f"{findings.count:,} records, none broken"
    )


def _ends(findings: Findings, tokenizer: PreTrainedTokenizerFast | None) -> str:
    """Return by which tokens answers end, and that generation stops at another one where it does."""
    assert tokenizer is not None
    names = {number: tokenizer.convert_ids_to_tokens(number) for number in findings.ends if number >= 0}
    text = f"answers end with {' or '.join(names.values()) or 'no control token'}"
    if all(number == tokenizer.eos_token_id for number in names):
        return text
    return (
        f"{text}; the tokenizer's own end is {tokenizer.eos_token}: generation_config.json has to name those above as "
        "eos_token_id, too, for generation to stop there"
    )


def _show_sample(sample: Sample, legend: str) -> None:
    """Print a record, trained text in colour, or between `MARKS` where there is none.

    Args:
        sample: the record.
        legend: the words after its place, with a gap for each mark.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=terminal(), highlight=False, soft_wrap=True, emoji=False)
    has_colours = console.color_system is not None and not console.no_color
    colours = [f"in {colour}" for colour in COLOURS.values()]
    signs = [f"between {begin} and {end}" for begin, end in MARKS.values()]
    title = f"{sample.place} ({legend.format(*(colours if has_colours else signs))})\n"
    text = Text(printable(title), style="bold" if has_colours else "")
    for part, mark in sample.parts:
        part = printable(_shortened(part))
        if has_colours:
            text.append(part, style=f"not bold {COLOURS.get(mark, '')}".rstrip())
        else:
            text.append(part.join(MARKS[mark]) if mark else part)
    console.print(text, end="\n\n")


def _shortened(part: str) -> str:
    """Return a part of a conversation, without its middle where it is long."""
    if len(part) <= PART:
        return part
    end = PART - BEGINNING
    return f"{part[:BEGINNING]} ... {len(part) - PART:,} more letters ... {part[-end:]}"
