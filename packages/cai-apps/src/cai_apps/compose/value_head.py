"""Reward models: the layers of a causal language model, and one number for each token in place of logits.

The parameters have the names of transformers' `...ForSequenceClassification`: those of the causal model, and
`score.weight` [1, hidden]. A reward is the number at a text's last token (Stiennon et al., arXiv:2009.01325).
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cai_mesh.errors import ConfigError
from cai_mesh.files import check_header, weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

HEAD = "score"
"""The name of the value head in a model, and in files."""


class _ValueHead:
    """A model of transformers whose class it is mixed into: the layers under their usual name, then the head."""

    def __init__(self, config: PretrainedConfig):
        from transformers import AutoModel

        super().__init__(config)  # type: ignore[call-arg]
        model: Any = self
        setattr(model, model.base_model_prefix, AutoModel.from_config(config, trust_remote_code=False))
        self.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        model.post_init()

    def get_output_embeddings(self) -> None:
        """Return nothing: the model has no logits."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> Any:
        """Return an output whose `logits` [B, S, 1] are the number at each token.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [B, S]; None: from 0 on.
            use_cache: whether keys and values are kept for texts that go on.
            options: other arguments of the layers.
        """
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        layers = getattr(self, self.base_model_prefix)  # type: ignore[attr-defined]
        hidden = layers(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **options)
        return SequenceClassifierOutputWithPast(logits=self.score(hidden.last_hidden_state))  # type: ignore[arg-type]


@functools.cache
def _class_of(config_class: type) -> type:
    """Return the class of reward models of a kind: it has the abilities of the kind's own classes.

    Its name is that of transformers' own, by which an export's config says what opens it.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        PreTrainedModel,
    )

    causal, layers = MODEL_FOR_CAUSAL_LM_MAPPING[config_class], MODEL_MAPPING[config_class]
    published = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config_class]
    base = next(kind for kind in layers.__mro__[1:] if issubclass(kind, PreTrainedModel))
    attributes = {"base_model_prefix": causal.base_model_prefix, "__module__": __name__}
    return type(published.__name__, (_ValueHead, base), attributes)


def reward_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the reward model of a causal language model's config, on the device of the context.

    Raises:
        ConfigError: transformers has no layers of this kind apart from their head, or no sequence classification.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from cai_apps.compose.models import without_values

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _no_reward_model(
            config, "transformers has no ...ForSequenceClassification that could be exported"
        )
    try:
        kind = _class_of(type(config))
    except (KeyError, StopIteration):
        raise _no_reward_model(config, "transformers has no such layers without a head") from None
    return without_values(kind(config))


def published_config(config: PretrainedConfig, padding: int | None) -> PretrainedConfig:
    """Return the config of a reward model as transformers has it: of a sequence classification with one label.

    Args:
        config: the config of the causal model.
        padding: the id that fills texts up; None: there is none, and the model takes one text at a time.
    """
    published = copy.deepcopy(config)
    published.num_labels, published.pad_token_id = 1, padding
    return published


def check_reward_model(config: PretrainedConfig) -> None:
    """Raise ConfigError unless transformers has the same model as a sequence classification, by names and shapes."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        model = reward_model(config)
        published = AutoModelForSequenceClassification.from_config(
            published_config(config, None), trust_remote_code=False
        )
    ours, theirs = (
        {name: tuple(param.shape) for name, param in one.named_parameters()} for one in (model, published)
    )
    if ours != theirs:
        name, shape = next(iter(sorted(set(ours.items()) ^ set(theirs.items()))))
        raise _no_reward_model(config, f"transformers' own has other parameters, such as {name} {shape}")


def has_stored_head(directory: Path, config: PretrainedConfig) -> bool:
    """Return whether the weights of a directory have a value head, under the name that it has here.

    Args:
        directory: the weights, as transformers or another library wrote them.
        config: the config of the causal model that they belong to.

    Raises:
        ConfigError: they have one that says several numbers, or a head under another name, which would be lost.
        CheckpointError: the files are not sound.
    """
    name = f"{HEAD}.weight"
    files = weight_files(directory, error=ConfigError).tensors
    _check_all_read(directory, [other for other in files if other != name], config)
    if name not in files:
        return False
    shape = check_header(directory / files[name])[name]["shape"]
    if shape[0] != 1:
        raise ConfigError(
            f"the weights at {directory} classify into {shape[0]} labels",
            got=f"{name} {tuple(shape)}",
            expected="one number for each text, which is its reward",
            fix="take a model that was saved with num_labels = 1, or one without a head, to which a new one is given",
        )
    return True


def _check_all_read(directory: Path, names: list[str], config: PretrainedConfig) -> None:
    """Raise ConfigError where a tensor lies outside a causal model: other libraries name their heads in other ways."""
    from cai_apps.compose.models import meta_model

    model = meta_model(config)
    layers = getattr(model, model.base_model_prefix)
    parts = {part for one in (model, layers) for part, _ in (*one.named_children(), *one.named_parameters())}
    unread = sorted(name for name in names if name not in parts and name.partition(".")[0] not in parts)
    if unread:
        raise ConfigError(
            f"the weights at {directory} hold tensors that a reward model does not read",
            got=", ".join(unread[:4]) + (", ..." if len(unread) > 4 else ""),
            expected=f"the tensors of {type(model).__name__}, and {HEAD}.weight [1, hidden] if there is a value head",
            cause="another library names its value head in another way, or gives it a bias or layers of its own",
            fix=f"if the head is one matrix without a bias, rename it to {HEAD}.weight; to begin with a new head, "
            "remove these tensors",
        )


def _no_reward_model(config: PretrainedConfig, cause: str) -> ConfigError:
    return ConfigError(
        f"no reward model of model_type {config.model_type!r}",
        expected="a kind with layers and a sequence classification of one shape, such as llama, qwen3, gemma2 or gpt2",
        cause=cause,
        fix="take a model of another kind",
    )
