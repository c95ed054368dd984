"""Text from an exported model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cai_apps import applications
from cai_apps.applications.language.weights import reader
from cai_apps.compose.adapter_files import check_adapter, check_trained_beside, load_adapter
from cai_apps.compose.expert_adapters import let_adapters_compute
from cai_apps.compose.lora import add_adapters, initializer, is_adapter, learned_modules, need_peft
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import load_model_config, meta_model, pretrained_directory
from cai_apps.compose.pretrained import check_causal, check_room, open_pretrained
from cai_apps.compose.quantized_base import QuantizedBase, check_quantized, codes_of
from cai_apps.config import file as config_file
from cai_apps.config.adapters import Adapter, is_adapter_folder, read_adapter
from cai_apps.config.sections import BaseKind, LoRA
from cai_apps.data.chat.messages import SYSTEM, USER, Conversation, Message
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.content import digest_of_weights
from cai_apps.data.prepare import check_ids
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import SpecialTokens, load_tokenizer, prompt_ids
from cai_apps.engine import LLM, Answer, EngineOptions, Sampling
from cai_apps.engine.llm import check_kind
from cai_apps.engine.text import AnswerText
from cai_apps.run.files.directory import RunDirectory
from cai_kernels import QuantizedKind
from cai_mesh.checkpoint import latest
from cai_mesh.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

ONE = EngineOptions(requests=1)
"""The engine of a single prompt, which takes no more memory than that fills."""
SAMPLING = Sampling(temperature=0.8, seed=0)


@dataclass(frozen=True)
class Place:
    """The directories of what generates.

    Args:
        model: an HF model directory.
        adapter: a folder of peft with an adapter for it; None: it has none.
        cache: the directory in which the digest of a base is kept, as `data.cache`.
        base: the form of the linear layers of the model's blocks; "compute": the dtype of its files.
    """

    model: Path
    adapter: Path | None = None
    cache: str = Data().cache
    base: BaseKind = "compute"

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer: an adapter may have been trained with another than its base's."""
        has_own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.adapter if has_own and self.adapter is not None else self.model


def place_of(
    directory: Path, adapter: Path | None = None, cache: str = Data().cache, base: BaseKind = "compute"
) -> Place:
    """Return the model of a directory; of one with an adapter alone its base, by the name that the adapter has for it.

    Args:
        directory: an export, another HF model directory, or a folder of peft.
        adapter: a folder of peft with an adapter for the model.
        cache: the directory in which the digest of a base is kept.
        base: the form of the linear layers of its blocks.

    Raises:
        ConfigError: there is neither a model nor an adapter, or there are two adapters, or the base is not there.
    """
    if (directory / "config.json").is_file():
        return Place(directory, adapter, cache, base)
    if not is_adapter_folder(directory):
        raise ConfigError(
            f"not an HF model directory: {directory}", expected="the directory of an export, or of an adapter"
        )
    if adapter is not None:
        raise ConfigError(
            f"{directory} is an adapter itself",
            got=f"--adapter {adapter}",
            fix="name the base, or leave --adapter out",
        )
    name = read_adapter(directory).base
    if not name:
        raise ConfigError(
            f"the adapter at {directory} does not say beside which model it was trained",
            fix="cai generate MODEL --adapter " + str(directory),
        )
    return Place(pretrained_directory(name), directory, cache, base)


def exported(directory: Path, base: BaseKind | None = None) -> tuple[Path, BaseKind]:
    """Return where the weights of a run are, and the form of their base; of another directory itself.

    Args:
        directory: a run, its best/, or what `place_of` takes.
        base: the form of the linear layers of its blocks; None: that of the run, or the dtype of the files.

    Raises:
        ConfigError: the run has written no export.
    """
    run = RunDirectory(directory)
    is_best = not run.config_file.is_file() and directory == RunDirectory(directory.parent).best
    if is_best:
        run = RunDirectory(directory.parent)
    if not run.config_file.is_file():
        return directory, base or "compute"
    form: BaseKind = base or config_file.parse(run.config_file).get("lora", {}).get("base") or "compute"
    if is_best:
        return best_export(run), form
    if not run.export.is_dir():
        raise ConfigError(
            f"the run {run.path} has no export yet",
            cause="a run writes it after its last step",
            fix=f"let it go on to its end, or `cai export {run.path} DIR` and name DIR",
        )
    return run.export, form


def best_export(run: RunDirectory) -> Path:
    """Return the model of a run's best checkpoint, which `cai export` of its application makes once.

    Raises:
        CheckpointError: the run keeps no such checkpoint.
    """
    newest = latest(run.best)
    if newest is None:
        raise CheckpointError(
            f"the run {run.path} has no best checkpoint",
            cause="checkpoint.best = true keeps one, after the first validation",
        )
    directory = run.best_export / newest.name
    if not directory.is_dir():
        module = applications.commands()["export"][applications.of_directory(run.path)][1]
        with redirect_stdout(sys.stderr):
            importlib.import_module(module).run([str(newest), str(directory)])
    return directory


def generate(
    directory: Path,
    prompt: str = "def ",
    sampling: Sampling = SAMPLING,
    *,
    adapter: Path | None = None,
    special_tokens: SpecialTokens = "text",
    chat: bool = False,
    system: str | None = None,
    chat_template: Path | None = None,
    cache: str = Data().cache,
    base: BaseKind = "compute",
) -> str:
    """Return the prompt with its continuation, or the answer to it.

    The prompt's ids are those of a document that begins so in training. `special_tokens` says whether control tokens
    written in it are text, or parsed.

    Args:
        directory: an export, another HF model directory, or a folder of peft with an adapter.
        prompt: the text to go on with; with `chat` a user's message, which the tokenizer's template writes.
        sampling: options by which tokens are chosen.
        adapter: a folder of peft with an adapter for the model.
        special_tokens: whether control tokens in the prompt are text, or the tokens that they spell.
        chat: whether the prompt is a message that is to be answered.
        system: the system's message before it, with `chat`.
        chat_template: a file with a chat template; None: the tokenizer's.
        cache: the directory in which the digest of an adapter's base is kept.
        base: the form of the linear layers of the model's blocks: "nf4" and "int8" as training has them.

    Raises:
        ConfigError: `directory` is not an HF model directory with a tokenizer and safetensors, or the adapter is of
            another model.
        DataError: the tokenizer has ids that the model has no row for.
        CheckpointError: an index names files outside it, or the header of a file is not sound.
    """
    place = place_of(directory, adapter, cache, base)
    tokenizer = load_tokenizer(place.tokenizer)
    if not chat:
        ids = prompt_ids(tokenizer, prompt, special_tokens)
        return continued(place, tokenizer, ids if prompt else [], sampling)
    before = () if system is None else (Message(SYSTEM, system),)
    conversation = Conversation((*before, Message(USER, prompt)))
    ids = renderer_of(tokenizer, chat_template).question(conversation)
    return continued(place, tokenizer, ids, sampling, only_new=True)


def renderer_of(tokenizer: PreTrainedTokenizerFast, chat_template: Path | None) -> Renderer:
    """Return what writes conversations as ids, by a template in a file or by the tokenizer's.

    Raises:
        ConfigError: there is none.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template",
            cause="base models often have none: nothing says how a conversation is written as text",
            fix="--chat-template FILE, such as that of the model's instruct form; or --prompt without --chat",
        )
    return Renderer(
        tokenizer, load_template(tokenizer, None if chat_template is None else str(chat_template))
    )


def continued(
    place: Place,
    tokenizer: PreTrainedTokenizerFast,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    only_new: bool = False,
) -> str:
    """Return the text of a prompt's ids and those chosen after them, or of the latter alone; errors as `generate`."""
    writer = Writer(place, tokenizer, ONE)
    writer.check(prompt, sampling)
    writer.check_finite(prompt)
    (answer,) = writer.answers([prompt], [sampling])
    if only_new:
        return answer.text
    return str(tokenizer.decode(list(prompt), skip_special_tokens=True)) + answer.text


class Writer:
    """The model of a place, ready to write: by the engine, or by transformers where the engine refuses its kind.

    Args:
        place: the directories of the model.
        tokenizer: the tokenizer.
        options: the size of the engine.

    Attributes:
        place, tokenizer: as given.
        device, model: the model, in evaluation, and its device.
        llm: the engine; None where it refuses this kind of model.
        refusal: its reason.
    """

    def __init__(self, place: Place, tokenizer: PreTrainedTokenizerFast, options: EngineOptions):
        self.place, self.tokenizer = place, tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = open_model(place, self.device).to(self.device).eval()
        self.llm: LLM | None = None
        self.refusal = ""
        try:
            check_kind(self.model)
        except ConfigError as error:
            self.refusal = error.what
            print(f"transformers computes this model, one prompt at a time: {error.what}", file=sys.stderr)
        else:
            self.llm = LLM(self.model, tokenizer, options=options, trains=False)

    @classmethod
    def of(cls, place: Place) -> Writer:
        """Return the model of a place for one prompt at a time, with the tokenizer of the place."""
        return cls(place, load_tokenizer(place.tokenizer), ONE)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Return what is written after prompts of ids, the first of `n` answers to each.

        Args:
            prompts: ids of each.
            samplings: options of each.
            on_answer: is called with the number of a prompt and its answer as soon as that is complete.
        """
        tell = on_answer or (lambda number, answer: None)
        if self.llm is not None:
            outputs = self.llm.generate(
                prompts, samplings, on_output=lambda number, output: tell(number, output.answers[0])
            )
            return [output.answers[0] for output in outputs]
        answers = []
        for number, pair in enumerate(zip(prompts, samplings, strict=True)):
            answers.append(self._plain(*pair))
            tell(number, answers[-1])
        return answers

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        """Yield the text of an answer while it is written; of a model that transformers computes, all at once."""
        if self.llm is None:
            yield self._plain(prompt, sampling).text
            return
        for piece in self.llm.stream(prompt, sampling):
            yield piece.text

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise an error of `generate` where a prompt cannot be continued."""
        if not prompt:
            raise ConfigError("the prompt is empty", expected="text of one token at least")
        check_ids(np.asarray(prompt), self.model.get_input_embeddings().num_embeddings)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < len(prompt) + sampling.max_tokens:
            raise ConfigError(
                "the prompt and its continuation are longer than the model's positions",
                got=f"{len(prompt)} + {sampling.max_tokens} tokens",
                expected=f"at most {limit} (max_position_embeddings)",
            )

    def check_finite(self, prompt: Sequence[int]) -> None:
        """Raise CheckpointError where the model predicts nothing finite after a prompt."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([prompt], device=self.device)).logits
        if not logits.isfinite().all():
            raise CheckpointError(
                f"what the model of {self.place.adapter or self.place.model} predicts is not finite",
                cause="its weights are damaged, or it was trained too fast",
                fix="export an earlier checkpoint",
            )

    def _plain(self, prompt: Sequence[int], sampling: Sampling) -> Answer:
        """Return what transformers writes after a prompt."""
        if sampling.form is not None:
            raise ConfigError(
                f"{sampling.form[0]} is the engine's, which does not compute this model", cause=self.refusal
            )
        ids = torch.tensor([prompt], device=self.device)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if options["do_sample"]:
            options |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        torch.manual_seed(sampling.seed or 0)
        with torch.inference_mode():
            written = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                pad_token_id=self.tokenizer.eos_token_id,
                repetition_penalty=sampling.repetition_penalty,
                stop_strings=list(sampling.stop) or None,
                tokenizer=self.tokenizer,
                **options,
            )
        answer = written[0, len(prompt) :].tolist()
        text = AnswerText(self.tokenizer, prompt, sampling.stop)
        for token in answer:
            text.add(token)
        text.finish()
        return Answer(tuple(answer), text.text, "length" if len(answer) == sampling.max_tokens else "stop")


def open_model(place: Place, device: torch.device) -> Any:
    """Return the causal language model of a place, whose files are sound; one in codes is on the device."""
    directory, adapter = place.model, None if place.adapter is None else read_adapter(place.adapter)
    if adapter is not None:
        need_peft()
    check_causal(directory)
    if place.base != "compute":
        return _quantized(place, place.base, adapter, device)
    if device.type == "cuda":
        check_room(directory, torch.cuda.mem_get_info(device)[0])
    model = open_pretrained(directory)
    if adapter is not None:
        put_adapter(model, adapter, place)
        let_adapters_compute(model)
        load_adapter(model, adapter.directory)
    return model


def _quantized(place: Place, kind: QuantizedKind, adapter: Adapter | None, device: torch.device) -> Any:
    """The model of a place with the linear layers of its blocks in codes, made block by block on a device."""
    from transformers import GenerationConfig

    config = load_model_config(str(place.model))
    model = meta_model(config).requires_grad_(False)
    if adapter is not None:
        put_adapter(model, adapter, place)
        let_adapters_compute(model)
    check_quantized(model, kind)
    read = reader(str(place.model), lambda: place.model)
    materialize(
        model,
        initializer,
        seed=0,
        dtype=getattr(config, "dtype", None) or torch.bfloat16,
        device=device,
        pretrained=True,
        finished=QuantizedBase(kind, read).filler(model),
    )
    codes = codes_of(model)
    read(model, lambda name: name not in codes and not is_adapter(name))
    if adapter is not None:
        load_adapter(model, adapter.directory)
    if (place.model / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(place.model)
    return model


def put_adapter(model: nn.Module, adapter: Adapter, place: Place) -> None:
    """Put the layers of an adapter into a model, in place; their values are read by `load_adapter`.

    Args:
        model: the model, on any device.
        adapter: the adapter.
        place: the directories of the model.

    Raises:
        ConfigError: the adapter was trained beside another model.
    """
    digest = None
    if adapter.base_digest is not None:
        digest = digest_of_weights({"": place.model}, place.cache)
    check_trained_beside(adapter, str(place.model), digest)
    lora = LoRA(
        rank=adapter.rank, alpha=adapter.alpha, rank_stabilized=adapter.rank_stabilized, dora=adapter.dora
    )
    add_adapters(model, lora, adapter.targets, learned_modules(model, adapter.modules))
    check_adapter(adapter, model)
