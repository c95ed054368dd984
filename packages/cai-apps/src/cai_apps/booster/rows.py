"""Rows of tokens that ranks have together: what a loop gives whole is cut, and its loss is that of the whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cai_mesh.comm import ParallelMesh, all_reduce
from cai_mesh.errors import ConfigError
from cai_tensor_parallel import cut_batch

IGNORED = -100
CUT = ("input_ids", "labels", "position_ids", "attention_mask")
"""Arguments of a causal language model with a number for each token."""


class Rows:
    """The cut of batches of whole rows over the ranks of `cp`.

    Args:
        mesh: the mesh of the model.
    """

    def __init__(self, mesh: ParallelMesh):
        self._mesh, self._group, self._ranks = mesh, mesh.group("cp"), mesh.degree("cp")

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the model says of this rank's tokens; its loss is that of the whole rows, on every rank.

        Args:
            model: a causal language model of transformers, after `parallelize_context`.
            args, kwargs: the arguments of a call with whole rows.
        """
        output = model(**self.cut(args, kwargs))
        if kwargs.get("labels") is not None:
            output["loss"] = self.whole(output["loss"])
        return output

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call for this rank's tokens; their loss is divided by the labels of whole rows.

        Raises:
            ConfigError: the model was not called with rows by name.
        """
        if len(args) == 1:
            args, kwargs = (), {"input_ids": args[0], **kwargs}
        if args or kwargs.get("input_ids") is None:
            raise ConfigError(
                "rows are divided over ranks, and the model was not called with rows by name",
                got=f"{len(args)} arguments without a name, {', '.join(kwargs) or 'none'} by name",
                expected="input_ids, and where there are labels, position_ids, attention_mask",
            )
        batch = {name: value for name, value in kwargs.items() if name in CUT and value is not None}
        parts: dict[str, Any] = {name: value for name, value in kwargs.items() if name not in CUT}
        parts |= cut_batch(batch, self._mesh)
        if "labels" in batch:
            parts["labels"] = parts["shift_labels"]
            parts["num_items_in_batch"] = (batch["labels"][:, 1:] != IGNORED).sum()
        return parts

    def whole(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of a loss, whose gradient is this rank's part as often as there are ranks.

        Ranks of `cp` average their gradients, as data ranks do; those of parts of a loss are to be added.
        """
        total = part.detach().clone()
        all_reduce(total, self._group).wait()
        times = part * self._ranks
        return times + (total - times).detach()
