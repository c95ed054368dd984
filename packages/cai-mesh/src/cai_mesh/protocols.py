"""The protocols by which packages that never import each other know one another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from cai_mesh.comm.handles import CommHandle as CommHandle  # published here, beside the others

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from cai_mesh.comm.groups import AnyMesh


@runtime_checkable
class TensorHandle(Protocol):
    """A tensor under way."""

    def wait(self) -> torch.Tensor | None:
        """The tensor, once the caller's stream may use it; None where there is none."""
        ...


@runtime_checkable
class LinearProducts(Protocol):
    """The three matrix products of a linear layer as plain functions of tensors, traceable by torch.compile."""

    @property
    def key(self) -> str:
        """Equal for products that make a weight's gradient from the same operands in the same way."""
        ...

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """x [..., in] -> (y [..., out], what backward needs beside the weight)."""
        ...

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """dy [..., out] -> (dx [..., in], operands of the weight's gradient, bias's gradient), as far as needed."""
        ...

    def weight_grad(self, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The weight's gradient, in the weight's shape."""
        ...

    def write_weight_grad(
        self, operands: tuple[torch.Tensor, ...], out: torch.Tensor, *, fresh: bool
    ) -> None:
        """Write the weight's gradient to `out`, of the weight's shape and perhaps another dtype, or add it."""
        ...


@runtime_checkable
class LinearRule(Protocol):
    """The rule of a linear layer: its products, and what ranks that share the layer say to each other around them.

    As `LinearProducts`, but for `backward`: the gradient of the input may still be under way when it returns, and is
    waited for only after the weight's gradient has been issued.
    """

    @property
    def key(self) -> str:
        """Equal for rules that make a weight's gradient from the same operands in the same way."""
        ...

    @property
    def products(self) -> LinearProducts:
        """The layer's own arithmetic."""
        ...

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]: ...

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[TensorHandle, tuple[torch.Tensor, ...], torch.Tensor | None]: ...

    def weight_grad(self, operands: tuple[torch.Tensor, ...]) -> torch.Tensor: ...

    def write_weight_grad(
        self, operands: tuple[torch.Tensor, ...], out: torch.Tensor, *, fresh: bool
    ) -> None: ...


@dataclass(frozen=True)
class AttentionCall:
    """What an attention layer asks of its rule, beside queries, keys and values.

    Args:
        scale: factor on query @ key.T.
        causal: a query sees keys up to its own position; the last query is at the position of the last key.
        window: a query sees its own position and window - 1 before it; None: all.
        softcap: scores become softcap * tanh(score / softcap), before the mask; None: they stay.
        dropout: probability of dropping a weight, 0 in evaluation.
        cu_seqlens: [B, D + 1] int32: document d of row b is at cu_seqlens[b, d]..cu_seqlens[b, d + 1], and sees itself
            alone. A row ends with Sk, repeated where it has fewer documents. None: a row is one document.
        query_cu_seqlens: [B, D + 1] int32, the same of queries, where they are others than the last Sq of a row: those
            of a document are at its last keys, and a row ends with Sq. None: they are the last.
        mask: bool, True is seen, or floating, added: [B, Sk] or broadcastable to [B, N, Sq, Sk]. It comes on top of
            causality, window and documents.
        prefixes: [B, D] int32: the document that each document of `cu_seqlens` goes on from, or its own number. It sees
            that one too, as though the two were one sequence; what a document goes on from goes on from none. Sq = Sk.
            None: each begins anew.
        sinks: [N]: of each head a score without a value, which takes its part of every softmax; None: there are none.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    cu_seqlens: torch.Tensor | None = None
    query_cu_seqlens: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    prefixes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@runtime_checkable
class AttentionRule(Protocol):
    """How a layer attends: on one rank, over ranks that divide its sequence, or with keys that a cache has."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """[B, N, Sq, H], [B, Nkv, Sk, H] twice -> [B, N, Sq, H]; traceable by torch.compile.

        Everything beside the tensors is in `call`, so that a forward that is run again in backward sees the same.
        """
        ...


@runtime_checkable
class AttentionParts(Protocol):
    """Attention to some keys at a time, whose results are merged: what ranks need that pass keys on.

    A class of a module's own, made without arguments.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, N, Sq, H], [B, Nkv, Sk, H] twice -> (out [B, N, Sq, H], log-sum-exp [B, N, Sq], float32 or wider).

        The call has neither mask, prefixes, dropout nor sinks, and is not recorded by autograd. Of a query that sees
        none of these keys out is zero and the other -inf.
        """
        ...

    def merge(
        self, first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention to two sets of keys, from that to each; out is float32 or wider."""
        ...

    def backward(
        self,
        dout: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of key and value, and the part of the query's that comes from these keys, query first.

        `out` [B, N, Sq, H], in the query's dtype, and `lse` are those of the attention to all keys.
        """
        ...


@runtime_checkable
class GradSync(Protocol):
    """Whoever combines gradients across ranks while backward runs."""

    def defer(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate. A backward outside reduces what has accumulated."""
        ...

    def finish(self) -> None:
        """Wait for every reduction of the step."""


@runtime_checkable
class ParameterSharding(Protocol):
    """Whoever keeps parameters sharded between uses.

    `driver` says who calls: module hooks ("hooks") or a schedule's actions ("actions"); never both.
    """

    driver: Literal["hooks", "actions"]

    def unshard(self, module: nn.Module) -> CommHandle:
        """Gather the parameters of `module` and everything below it."""
        ...

    def reshard(self, module: nn.Module) -> None:
        """Free what `unshard` gathered."""

    def reduce(self, module: nn.Module) -> None:
        """Start reducing the gradients accumulated below `module`."""


@runtime_checkable
class Stored(Protocol):
    """The part of a chunk that one rank keeps between uses; `cai_mesh.storage.StoredShard` is one.

    Attributes:
        on_device: [n], the shard on the device it is used on, from the `wait` of a fetch until the release.
    """

    on_device: torch.Tensor | None


@runtime_checkable
class Residency(Protocol):
    """The memory that a rank's shards, their gradients and what steps them live in."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The home of a new shard: the tensor itself, or a copy in another memory, complete on return."""
        ...

    def adopt(self, stored: Sequence[Stored], mesh: AnyMesh | None) -> None:
        """All shards of a model, once they are placed, and the mesh over whose ranks the model lies. Called once."""

    def train(self, stored: Stored) -> None:
        """A shard that was frozen gets gradients from now on, in `stored.gradients`."""

    def fetch(self, stored: Stored) -> CommHandle:
        """Bring a shard to its device, with the values of the last step.

        It is there for the stream on which `wait` is called, in `stored.on_device`, until it is released.
        """
        ...

    def release(self, stored: Stored) -> None:
        """Give up what was fetched: all that the current stream has waited for has read it; its memory may be taken."""

    def version(self, stored: Stored) -> int:
        """Another number whenever the shard has, or will have, got other values: by a step or a checkpoint."""
        ...

    def keep_gradient(self, stored: Stored, shard: torch.Tensor) -> None:
        """Add `shard` [n], written by the current stream, to the kept parameters' gradients. It is given away."""

    def drop_gradient(self, stored: Stored, index: int) -> None:
        """Forget the gradient of kept parameter `index`: no rank has had one since gradients were cleared."""
