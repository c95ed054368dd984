"""Plans: which role every module of a model plays, whatever the mode.

A role says what a module *is* to tensor parallelism; a mode (1d ...) decides the algorithm for each role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cai_mesh.errors import PlanError, did_you_mean

ROLES = {
    "colwise": "a linear layer cut by output features; its input is whole on every rank",
    "packed_colwise": "colwise, with blocks packed side by side in the output (2, or N as packed_colwise:N)",
    "colwise_gather_output": "colwise, the output made whole again",
    "rowwise": "a linear layer cut by input features; its input is cut already, its output summed",
    "packed_rowwise": "of a parameter: its last dimension is cut, with blocks packed side by side in it",
    "rowwise_split_input": "rowwise, for an input that is whole on every rank",
    "vocab_embedding": "an embedding cut by rows of the vocabulary",
    "embedding_rowwise": "vocab_embedding, of any table",
    "embedding_colwise": "an embedding cut by features, which are made whole again",
    "vocab_head": "the output layer cut by vocabulary; logits stay cut",
    "classifier": "a linear layer over the residual stream whose output is whole on every rank",
    "norm": "a norm over the features of the residual stream",
    "feature_embedding": "an embedding, such as of positions, that is added to the residual stream",
    "feature_parameters": "parameters whose last dimension is the features of the residual stream",
    "patch_embedding": "a convolution whose output channels are the features of the residual stream",
    "replicated": "whole on every rank, used alike on all",
    "replicate": "replicated",
    "replicated_with_grad_allreduce": "whole on every rank, applied to a part of the activations on each",
    "mla_kv_a_proj": "a whole linear layer whose last features, the rotary ones, each rank uses for its own heads",
    "moe_tp_experts": "a module whose cut parameters make a part of a sum: its inputs are whole, the sum is",
    "all_reduce": "moe_tp_experts, of a module that is always used",
    "moe_identity_expert": "an expert without parameters inside moe_tp_experts, counted once in the sum",
    "replicated_experts": "experts that make whole results of whole inputs, as those that are spread over ranks of ep",
    "local_params": "a module that computes as it is with parameters of its own that are cut",
}
"""Role names a plan may use, with what they mean.

colwise, rowwise and the packed ones are also for parameters by name, in a module with one of the roles of `HOLDERS`:
colwise cuts the last dimension but one (the only one of a vector), rowwise the last.
"""

PACKED = ("packed_colwise", "packed_rowwise")
HOLDERS = ("moe_tp_experts", "all_reduce", "local_params")
"""Roles of modules whose own parameters have roles."""
OF_PARAMETERS = ("colwise", "rowwise", *PACKED)
"""Roles that parameters may have."""

STREAM_ROLES = ("norm", "feature_embedding", "feature_parameters", "patch_embedding")
"""Roles of what modes 2d, 2.5d and 3d cut by the features of the residual stream; mode 1d keeps it whole."""


@dataclass(frozen=True)
class Role:
    """A parsed role: its kind, and for packed layers the number of blocks.

    Args:
        parameter: name in its module of the parameter whose role it is; "": it is the module's.
        heads: (query heads, key/value heads) of the attention whose key or value layer this is.
        width: number of last features that mla_kv_a_proj is about.
        unit: features of a head, where ranks have different numbers of heads; 1: all ranks have as many features.
    """

    kind: str
    blocks: int = 1
    parameter: str = ""
    heads: tuple[int, int] | None = None
    width: int = 0
    unit: int = 1


@dataclass(frozen=True)
class Plan:
    """Globs over names of modules and parameters to roles, and attributes that count features or heads of one rank.

    Args:
        roles: glob over fully-qualified names (`*` also matches dots) to a role name. It names parameters where its
            last word is that of one.
        divided: glob over module names to names of integer attributes that become 1/degree of themselves.
        arguments: glob over module names to tensors for all heads that come as arguments, of which a rank takes its
            part: "alibi:0:num_heads" is the argument `alibi`, whose dim 0 counts heads (or anything times heads, heads
            inside), as many as the attribute `num_heads` says before it is divided.
    """

    roles: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parsed(self) -> dict[str, Role]:
        """The roles by glob. Raises `PlanError` for a role that is unknown or not supported."""
        return {glob: parse_role(glob, text) for glob, text in self.roles.items()}


def parse_role(glob: str, text: str) -> Role:
    """Read a role name. Raises `PlanError` naming the glob when there is no such role."""
    kind, _, count = text.partition(":")
    packed = kind in PACKED
    if kind not in ROLES or (count and (not packed or not count.isdigit() or int(count) < 1)):
        raise PlanError(f"the plan gives {glob!r} an unknown role", got=text, fix=did_you_mean(kind, ROLES))
    return Role(kind, int(count) if count else 2 if packed else 1)
