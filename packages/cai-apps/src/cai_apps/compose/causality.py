"""Whether a language model predicts each token from those before it alone: tried on a small model of the same kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEEN = 1e-4
"""How far early logits may move for a later token, for each unit that the logits after it move. In float64 those of a
causal model do not move, or by 1e-6 where parts compute in float32; of one that reads both ways they move by 0.1."""


def check_reads_forwards(model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError where the early logits of a small model of this kind change with later tokens.

    Kinds of which no small model can be made pass.

    Args:
        model: a model on the meta device.
        name: the name of its config.
    """
    moved = _moved(model)
    if moved is not None and moved[0] > SEEN * moved[1]:
        raise ConfigError(
            f"{name} reads text in both directions: each token would be predicted from itself",
            got=f"a small {type(model).__name__} whose logits change with later tokens",
            expected="a causal language model",
            fix="see which value of its config.json lets tokens see later ones, such as is_causal or "
            "use_bidirectional_attention",
        )


def _moved(model: PreTrainedModel) -> tuple[float, float] | None:
    """Return how far logits move before and after the place from which on tokens change; None: that cannot be tried."""
    import torch

    from cai_mesh.trial import arguments_of, shrunk

    try:
        small = shrunk(model, labelled=False)
        tried, inputs = small.build(), small.inputs()
        ids = inputs["input_ids"]
        middle = ids.shape[1] // 2
        changed = ids.clone()
        changed[:, middle:] = (changed[:, middle:] + 1) % (int(ids.max()) + 1)
        with torch.no_grad(), torch.device("cpu"):
            first, second = (
                tried(**arguments_of(tried, inputs | {"input_ids": input_ids})).logits
                for input_ids in (ids, changed)
            )
    except Exception:  # whatever its code meets in a config made small
        return None
    difference = (first - second).abs()
    return float(difference[:, :middle].max()), float(difference[:, middle:].max())
