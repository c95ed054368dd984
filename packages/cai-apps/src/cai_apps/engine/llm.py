"""`LLM`: text from a causal language model, the one that trains or one of a directory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.compose.documents import check_continues
from cai_apps.compose.models import meta_model, pretrained_directory
from cai_apps.compose.pretrained import open_pretrained
from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.tokenizer import load_tokenizer, prompt_ids
from cai_apps.engine.beam import BeamOptions, BeamSearch
from cai_apps.engine.engine import Engine
from cai_apps.engine.grammar import Grammars
from cai_apps.engine.output import Answer, Output, Piece
from cai_apps.engine.request import BeamGroup, Request
from cai_apps.engine.room import EngineOptions, block_count
from cai_apps.engine.sampling import Sampling
from cai_apps.engine.schedule import Limits
from cai_apps.engine.text import AnswerText
from cai_kernels import swap
from cai_mesh.comm import all_gather_object
from cai_mesh.errors import ConfigError, PlanError
from cai_zero import sharding_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Prompt = str | Sequence[int]
"""A text, or the ids of one."""
KERNELS = ("norm", "activation", "rope", "experts")
"""Kinds of modules that run kernels; attention does in any case."""
Samplings = Sampling | Sequence[Sampling]
"""Options of all prompts, or of each."""


class LLM:
    """A causal language model that answers many prompts side by side.

    The model is the very module that trains, or one read from a directory: any of transformers whose attention layers
    look their attention up in its registry, and in which nothing else looks along a row. Keys and values are kept in
    blocks that requests share where they begin alike.

    Args:
        model: a directory of Hugging Face with weights, a hub id, or a module. A module is used where it is, in its
            dtype, and trains on afterwards as though nothing had been. The cache has no memory between calls.
        tokenizer: the tokenizer or its directory; None: the directory's. Without one prompts are ids.
        options: the size of the engine.
        trains: whether the weights may change between calls; None: those of a module may. Where they do not, a GPU
            keeps the cache and what was captured, and the module's parts run kernels (`cai_kernels.swap`).
        ranks: ranks that compute the model together, as tensor ranks and those of ZeRO-3 do: they are given the same
            prompts in the same order and return the same answers. None: this process has the model alone, as a data
            rank of ZeRO 0 to 2 does.

    Raises:
        ConfigError: there is no such directory, or no room, or a model of this kind cannot go on from keys in a cache.
        CheckpointError: the directory lacks weights.
        PlanError: the model's attention cannot be exchanged.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: str | Path | PreTrainedTokenizerFast | None = None,
        *,
        options: EngineOptions = EngineOptions(),
        trains: bool | None = None,
        ranks: dist.ProcessGroup | None = None,
    ):
        self._ranks = ranks
        self._is_live = isinstance(model, nn.Module) if trains is None else trains
        if not isinstance(model, nn.Module):
            tokenizer = model if tokenizer is None else tokenizer
            model = open_pretrained(
                pretrained_directory(str(model)), torch.device("cuda" if torch.cuda.is_available() else "cpu")
            )
        if ranks is None and _is_divided(model):
            raise ConfigError(
                "ZeRO-3 divides the weights of this model over ranks, which can only compute it together",
                fix="LLM(model, ranks=GROUP) on all of them, with the same prompts; or train in stage 2",
            )
        self.model = model
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        check_kind(model)
        if not self._is_live and next(model.parameters()).is_cuda:
            swap(model, kinds=KERNELS)
        longest = getattr(model.config, "max_position_embeddings", None)
        self.longest = longest if isinstance(longest, int) and longest > 0 else None
        self._words = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        blocks = min(all_gather_object(block_count(model, options, self.longest), ranks))
        limits = Limits(options.batch_tokens, options.requests, options.block_size)
        self.engine = Engine(
            model,
            limits,
            blocks,
            _ends(model, self.tokenizer),
            longest=self.longest,
            graphs=options.graphs and ranks is None,
        )
        self._grammars = Grammars(self.tokenizer, self._words, self.engine.ends)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Samplings = Sampling(),
        *,
        on_output: Callable[[int, Output], None] | None = None,
        **changes: Any,
    ) -> list[Output]:
        """Return the answers to prompts, in their order.

        Args:
            prompts: texts or ids; one or many.
            sampling: options by which tokens are chosen, or those of each prompt.
            on_output: is called with the number of a prompt and its answers as soon as those are complete.
            changes: fields of `Sampling` that are others, as `max_tokens=128`.

        Raises:
            ConfigError: a prompt is empty, too long, or has ids that the model does not know.
        """
        requests = self._ask(self._many(prompts), sampling, changes)
        outputs: dict[int, Output] = {}
        with self.engine.computing():
            for number, output in self._completed(requests):
                outputs[number] = output
                if on_output is not None:
                    on_output(number, output)
        return [outputs[number] for number in range(len(requests))]

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Samplings = Sampling(),
        **changes: Any,
    ) -> list[Output]:
        """Return the assistant's next message of conversations, written by the tokenizer's chat template.

        Args:
            conversations: messages {"role": ..., "content": ...} of one conversation, or of many.
            sampling, changes: as in `generate`.

        Raises:
            DataError: the template refuses a conversation.
        """
        many: Any = (
            conversations if conversations and not isinstance(conversations[0], Mapping) else [conversations]
        )
        return self.generate([self.question(messages) for messages in many], sampling, **changes)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Samplings = Sampling(), **changes: Any
    ) -> Iterator[Piece]:
        """Yield the tokens of all answers as they are chosen; whoever stops listening cancels the rest.

        While whoever listens has a piece, the model is as it was. Arguments and errors are those of `generate`, at the
        first piece.
        """
        pieces = self._run(self._ask(self._many(prompts), sampling, changes))
        try:
            while True:
                with self.engine.computing():
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            pieces.close()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], options: BeamOptions = BeamOptions(), count: int = 1
    ) -> list[Output]:
        """Return the likeliest answers to prompts by beam search, those of transformers' `generate(num_beams=...)`.

        Args:
            prompts: texts or ids; one or many.
            options: width and length of the search.
            count: answers to each prompt, the best first; `options.width` at most.

        Raises:
            ConfigError: as `generate`, or there is no room for all beams of a prompt.
        """
        if not 1 <= count <= options.width:
            raise ConfigError(
                "there are not as many beams", got=count, expected=f"1 to {options.width} answers"
            )
        sampling = Sampling(max_tokens=options.max_tokens, temperature=0)
        many = self._many(prompts)
        self._check_beams(many, options)
        groups = []
        for request in self._ask(many, sampling, {}):
            request.group = BeamGroup(BeamSearch(options, self.engine.ends), [request])
            groups.append(request.group)
        try:
            with self.engine.computing():
                while not all(group.search.is_done for group in groups):
                    self.engine.step()
        finally:
            self._cancel([request for group in groups for request in group.members])
        return [self._searched(*pair, count) for pair in zip(many, groups, strict=True)]

    def _searched(self, prompt: Sequence[int], group: BeamGroup, count: int) -> Output:
        answers = []
        for _, ids in group.search.answers[:count]:
            text = ""
            if self.tokenizer is not None:
                writer = AnswerText(self.tokenizer, prompt, ())
                for token in ids:
                    writer.add(token)
                writer.finish()
                text = writer.text
            answers.append(Answer(ids, text, "stop" if ids[-1] in self.engine.ends else "length"))
        return Output(tuple(prompt), tuple(answers))

    def _check_beams(self, prompts: Sequence[Sequence[int]], options: BeamOptions) -> None:
        """Raise ConfigError where the beams of a prompt need more blocks than there are."""
        pool = self.engine.pool
        longest = max((len(prompt) for prompt in prompts), default=0) + options.max_tokens
        blocks = options.width * -(-longest // pool.size)
        if blocks > pool.count:
            raise ConfigError(
                "the beams of a prompt are longer than the cache",
                got=f"{options.width} beams of up to {longest} tokens",
                expected=f"at most {pool.count} blocks of {pool.size} tokens",
                fix="give the engine more memory, or lower max_tokens or the width",
            )

    def question(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of messages up to where the assistant's next answer begins."""
        tokenizer = self._need_tokenizer("a chat is text")
        renderer = Renderer(tokenizer, load_template(tokenizer, None))
        return renderer.question(read_conversation({"messages": list(messages)}))

    def forget(self) -> None:
        """Forget the keys of earlier prompts, as after an update of the weights."""
        self.engine.pool.forget()

    def _many(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array or a tensor of ids
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        return [self._ids(prompt) for prompt in ([prompts] if one else prompts)]  # type: ignore[misc,union-attr]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return prompt_ids(self._need_tokenizer("a prompt is text"), prompt)
        return [int(token) for token in prompt]

    def _need_tokenizer(self, reason: str) -> PreTrainedTokenizerFast:
        if self.tokenizer is None:
            raise ConfigError(
                f"{reason}, and there is no tokenizer", fix="give LLM a tokenizer, or use ids alone"
            )
        return self.tokenizer

    def _ask(
        self, prompts: Sequence[Sequence[int]], sampling: Samplings, changes: Mapping[str, Any]
    ) -> list[Request]:
        """Add all prompts, or none of them."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise ConfigError(
                "there are not as many samplings as prompts",
                got=len(samplings),
                expected=f"{len(prompts)}, or one",
            )
        samplings = [replace(sampling, **changes) for sampling in samplings]
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self._check(prompt, sampling)
        if self._is_live:
            self.forget()  # weights may have been stepped since
        drawn = all_gather_object([random.getrandbits(62) for _ in prompts], self._ranks)[0]
        requests: list[Request] = []
        try:
            for prompt, sampling, seed in zip(prompts, samplings, drawn, strict=True):
                seed = seed if sampling.seed is None else sampling.seed
                requests.append(self.engine.add(prompt, sampling, seed=seed))
                requests[-1].matcher = self._grammars.matcher(sampling)
        except ConfigError:
            self._cancel(requests)
            raise
        return requests

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if self.longest is not None and len(prompt) + sampling.max_tokens > self.longest:
            raise ConfigError(
                "the prompt and its answer are longer than the model's positions",
                got=f"{len(prompt)} + {sampling.max_tokens} tokens",
                expected=f"at most {self.longest} (max_position_embeddings)",
                fix="shorten the prompt, or lower max_tokens",
            )
        ids = {
            "the prompt": prompt,
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for name, tokens in ids.items():
            wrong = [token for token in tokens if not 0 <= token < self._words]
            if wrong:
                raise ConfigError(
                    f"{name} has ids that the model does not know",
                    got=wrong[0],
                    expected=f"0 to {self._words - 1}",
                    cause="the tokenizer is another model's" if name == "the prompt" else "",
                )
        if sampling.stop:
            self._need_tokenizer("a text ends the answer")

    def _completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Output]]:
        """Step until all requests have ended; yield the number and the output of each when it has.

        Text is read while it grows only where a text may stop it.
        """
        going = dict(enumerate(requests))
        texts = {number: {} for number, request in going.items() if request.sampling.stop}
        passed: Counter[int] = Counter()
        try:
            while going:
                self.engine.step()
                for number in texts.keys() & going.keys():
                    for _ in self._pieces(going[number], number, passed, texts[number]):
                        pass
                ended = [number for number, request in going.items() if _has_ended(request)]
                for number in ended:
                    yield number, self._output(going.pop(number))
        finally:
            self._cancel(_all(requests))

    def _run(self, requests: Sequence[Request]) -> Generator[Piece]:
        """Step until all requests have ended; on an error, or when nobody listens, the rest are cancelled.

        Others may step the same engine in between: what is told of a request is what its answer has more than before.
        """
        texts: dict[int, AnswerText] = {}
        passed: Counter[int] = Counter()
        try:
            while True:
                for number, request in enumerate(requests):
                    yield from self._pieces(request, number, passed, texts)
                if all(request.ending is not None for request in _all(requests)):
                    return
                self.engine.step()
        finally:
            self._cancel(_all(requests))

    def _pieces(
        self, first: Request, number: int, passed: Counter[int], texts: dict[int, AnswerText]
    ) -> Iterator[Piece]:
        """Yield the pieces of a prompt's answers that were not told before."""
        for request in [first, *first.siblings]:
            while passed[request.number] < len(request.answer):
                passed[request.number] += 1
                yield self._piece(request, number, passed[request.number], texts)

    def _piece(self, request: Request, number: int, count: int, texts: dict[int, AnswerText]) -> Piece:
        """Return the piece of token number `count` of an answer; end the answer there if a text of `stop` is met."""
        text, token = "", request.answer[count - 1]
        if self.tokenizer is not None:
            stop = request.sampling.stop
            writer = texts.get(request.number)
            if writer is None:
                writer = texts[request.number] = AnswerText(self.tokenizer, request.prompt, stop)
            writer.add(token)
            if writer.is_stopped:
                self.engine.end(request, "stop")
                del request.answer[count:], request.logprobs[count:]
            is_last = request.ending is not None and count == len(request.answer)
            if is_last:
                writer.finish()
            text = writer.pass_on(ends=is_last)
            request.text = writer.text
        ending = request.ending if count == len(request.answer) else None
        return Piece(number, request.index, token, text, ending)

    def _text(self, request: Request) -> str:
        """Return the text of an answer that has ended."""
        if self.tokenizer is None or request.sampling.stop:
            return request.text
        writer = AnswerText(self.tokenizer, request.prompt, ())
        writer.add_all(request.answer)
        return writer.text

    def _cancel(self, requests: Sequence[Request]) -> None:
        """End requests; a module that trains on has the memory of the cache again where none is left."""
        for request in requests:
            self.engine.cancel(request.number)
        if self._is_live:
            self.engine.free()

    def _output(self, request: Request) -> Output:
        answers = [
            Answer(
                tuple(answer.answer), self._text(answer), answer.ending or "cancelled", tuple(answer.logprobs)
            )
            for answer in [request, *request.siblings]
        ]
        return Output(request.prompt, tuple(answers), tuple(request.prompt_logprobs))


def _has_ended(request: Request) -> bool:
    """Return whether all answers to a request's prompt have ended."""
    return all(answer.ending is not None for answer in (request, *request.siblings))


def _all(requests: Sequence[Request]) -> list[Request]:
    return [member for request in requests for member in [request, *request.siblings]]


def check_kind(model: Any) -> None:
    """Refuse a model of a kind that the engine cannot compute, by a trial of a small one.

    Raises:
        ConfigError: its attention cannot be exchanged, or it cannot go on from keys and values alone, or be tried.
    """
    plain = type(model.config).from_dict(model.config.to_dict())  # without the attention that it trains with
    check_continues(meta_model(plain), model.config.model_type)


def _is_divided(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has divided the weights of a model."""
    try:
        sharding_of(model)
    except PlanError:
        return False
    return True


def _ends(model: Any, tokenizer: PreTrainedTokenizerFast | None) -> set[int]:
    """Return the ids at which a model ends an answer: those of its generation config, or of its config."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config, "eos_token_id", None)
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    numbers: list[Any] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return set(numbers)
