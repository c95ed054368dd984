"""`LLM`: text from a causal language model, the one that trains or one of a directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cai_apps.engine.answers import Answers, check_form
from cai_apps.engine.beam import BeamOptions, BeamSearch
from cai_apps.engine.engine import Engine
from cai_apps.engine.intake import Intake
from cai_apps.engine.output import Answer, Output, Piece
from cai_apps.engine.ranks import Ranks, has_stages
from cai_apps.engine.request import BeamGroup
from cai_apps.engine.room import EngineOptions, plan_cache, positions
from cai_apps.engine.sampling import Sampling
from cai_apps.engine.text import AnswerText
from cai_kernels import swap
from cai_mesh.comm import AnyMesh
from cai_mesh.errors import ConfigError
from cai_zero import unsharded

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
        ranks: ranks that compute the model together: a group of tensor ranks, or a mesh whose axes are those of
            tensor ranks and pipeline stages. They are given the same prompts in the same order and return the same
            answers. None: this process computes the model alone, as a data rank does. Data ranks of ZeRO-3 make an
            `LLM` and call it at the same time, each with its own prompts: weights are gathered once a call.

    Raises:
        ConfigError: there is no such directory, or no room, or a model of this kind cannot go on from keys in a cache.
        CheckpointError: the directory lacks weights.
        PlanError: the model's attention cannot be exchanged, or a GPU has no room for the weights of ZeRO-3.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: str | Path | PreTrainedTokenizerFast | None = None,
        *,
        options: EngineOptions = EngineOptions(),
        trains: bool | None = None,
        ranks: dist.ProcessGroup | AnyMesh | None = None,
    ):
        self._ranks = Ranks(ranks)
        self._is_live = isinstance(model, nn.Module) if trains is None else trains
        if not isinstance(model, nn.Module):
            tokenizer = model if tokenizer is None else tokenizer
            model = open_pretrained(
                pretrained_directory(str(model)), torch.device("cuda" if torch.cuda.is_available() else "cpu")
            )
        self.model = model
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        check_kind(model)
        if not self._is_live and next(model.parameters()).is_cuda:
            swap(model, kinds=KERNELS)
        self.longest = positions(model)
        words: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator,assignment]
        forward = self._ranks.forward_of(model)
        with unsharded(model):
            layout, limits, blocks = plan_cache(model, options, self.longest, self._ranks, forward)
        self.engine = Engine(
            model,
            limits,
            blocks,
            _ends(model, self.tokenizer),
            longest=self.longest,
            graphs=options.graphs and not has_stages(model),
            prompt_graphs=ranks is None,
            forward=forward,
            layout=layout,
        )
        self.intake = Intake(self.tokenizer, words, self.longest, sorted(self.engine.ends), self._ranks)

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
        many = self._many(prompts)
        answers = self._ask(many, sampling, changes)
        outputs: dict[int, Output] = {}
        try:
            with unsharded(self.model), self.engine.computing():
                while answers.going:
                    answers.step()
                    for number, request in answers.ended():
                        outputs[number] = answers.output(request)
                        if on_output is not None:
                            on_output(number, outputs[number])
        finally:
            self._close(answers)
        return [outputs[number] for number in range(len(many))]

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

        While whoever listens has a piece, the model is as it was; one of ZeRO-3 trains on after the last piece.
        Arguments and errors are those of `generate`, at the first piece.
        """
        answers = self._ask(self._many(prompts), sampling, changes, every_token=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close, answers)
            stack.enter_context(unsharded(self.model))
            while answers.going:
                with self.engine.computing():
                    pieces = answers.step()
                for _, request in answers.ended():
                    check_form(request)
                yield from pieces

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
        answers, groups = self._ask(many, sampling, {}), []
        for request in answers.going.values():
            request.group = BeamGroup(BeamSearch(options, self.engine.ends), [request])
            groups.append(request.group)
        try:
            with unsharded(self.model), self.engine.computing():
                while not all(group.search.is_done for group in groups):
                    self.engine.step()
        finally:
            for request in [request for group in groups for request in group.members]:
                self.engine.cancel(request.number)
            self._close(answers)
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
        blocks = options.width * self.engine.limits.blocks_of(longest)
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

    def answers(self, *, every_token: bool, texts: bool = True) -> Answers:
        """Return what answers prompts step by step, inside of `engine.computing()`, as a server does.

        Args:
            every_token: as `Answers` has it.
            texts: whether pieces have texts, and texts may stop answers.
        """
        return Answers(self.engine, self.intake, self.tokenizer if texts else None, every_token=every_token)

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Samplings,
        changes: Mapping[str, Any],
        *,
        every_token: bool = False,
    ) -> Answers:
        """Add all prompts, or none of them."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise ConfigError(
                "there are not as many samplings as prompts",
                got=len(samplings),
                expected=f"{len(prompts)}, or one",
            )
        samplings = [replace(sampling, **changes) for sampling in samplings]
        if self._is_live:
            self.forget()  # weights may have been stepped since
        answers = self.answers(every_token=every_token)
        answers.ask(prompts, samplings)
        return answers

    def _close(self, answers: Answers) -> None:
        """Cancel what has not ended; a module that trains on has the memory of the cache again where none is left."""
        answers.close()
        if self._is_live:
            self.engine.free()


def check_kind(model: Any) -> None:
    """Refuse a model of a kind that the engine cannot compute, by a trial of a small one.

    Raises:
        ConfigError: its attention cannot be exchanged, or it cannot go on from keys and values alone, or be tried.
    """
    plain = type(model.config).from_dict(model.config.to_dict())  # without the attention that it trains with
    check_continues(meta_model(plain), model.config.model_type)


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
