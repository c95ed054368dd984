"""Models whose blocks return, hold and use what blocks of real models do, by name."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch
from loops.kit import WIDTH, WORDS
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(kind: type[nn.Module]) -> type[nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    MODELS[kind.__name__] = build
    return kind


class Mlp(nn.Module):
    """A block like any other; other blocks change what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """An embedding, blocks and a head."""

    block: Callable[[], nn.Module] = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def run(self, layer, x):
        return layer(x)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


# -- what blocks return --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    note: str = "of a dataclass"


class Holder:
    def __init__(self, hidden):
        self.hidden = hidden


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


Pair = collections.namedtuple("Pair", "first hidden")


def returning(make, take):
    """A model whose blocks return `make(tensor)`, from which the model `take`s the tensor."""

    class Returning(Mlp):
        def forward(self, x):
            return make(super().forward(x))

    class Taking(Stack):
        block = Returning

        def run(self, layer, x):
            return take(layer(x))

    return Taking


RETURNS = {
    "ADataclass": (Out, lambda out: out.hidden),
    "ADataclassInATuple": (lambda x: (1, Out(x)), lambda out: out[1].hidden),
    "AnObject": (Holder, lambda out: out.hidden),
    "AnObjectWithSlots": (Slots, lambda out: out.hidden),
    "AnObjectInADict": (lambda x: {"a": [Holder(Out(x))]}, lambda out: out["a"][0].hidden.hidden),
    "AModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x), lambda out: out.last_hidden_state),
    "ANamedTuple": (lambda x: Pair(None, x), lambda out: out.hidden),
    "AClosure": (lambda x: lambda: x, lambda out: out()),
    "AGenerator": (lambda x: (y for y in [x]), lambda out: next(out)),
    "WhatNeedsNoGradientFirst": (lambda x: (x.detach(), x), lambda out: out[1]),
}
for name, (make, take) in RETURNS.items():
    kind = returning(make, take)
    kind.__name__ = name
    model(kind)


@model
class Nothing(Stack):
    """Blocks write to a list."""

    class Writer(Mlp):
        def forward(self, found):
            found.append(super().forward(found[-1]))

    block = Writer

    def forward(self, ids):
        found = [self.embed(ids)]
        for layer in self.layers:
            layer(found)
        return self.head(found[-1])


@model
class InPlace(Stack):
    """Blocks write to the tensor they are given, and return nothing."""

    class Writer(Mlp):
        def forward(self, x):
            x += self.down(torch.tanh(self.up(self.norm(x.clone()))))

    block = Writer

    def run(self, layer, x):
        x = x.clone()
        layer(x)
        return x


@model
class AttributeAside(Stack):
    """A loss of its own, made before the output, is kept on the block."""

    class Aside(Mlp):
        def forward(self, x):
            self.aside = self.up(x).square().mean()
            return super().forward(x)

    block = Aside

    def forward(self, ids):
        return super().forward(ids) + sum(layer.aside for layer in self.layers)


@model
class AttributeMadeLast(Stack):
    """The same, made after the output, from weights of the block."""

    class Aside(Mlp):
        def forward(self, x):
            x = super().forward(x)
            self.aside = self.up(x).square().mean()
            return x

    block = Aside

    def forward(self, ids):
        logits = super().forward(ids)
        return logits + sum(layer.aside for layer in self.layers)


@model
class OnlyAnAttribute(Stack):
    """The output has no gradient; what is kept on the block has."""

    class Aside(Mlp):
        def forward(self, x):
            self.aside = super().forward(x)
            return x.detach()

    block = Aside

    def run(self, layer, x):
        layer(x)
        return layer.aside


@model
class HiddenStatesByHooks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for layer in self.layers:
            layer.up.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, ids):
        self.seen.clear()
        logits = super().forward(ids)
        return logits + sum(seen.square().mean() for seen in self.seen)


# -- what is called outside a block's forward ----------------------------------------------------------------------


@model
class AChildOutside(Stack):
    def run(self, layer, x):
        return layer(layer.norm(x))


@model
class ALinearChildOutside(Stack):
    def run(self, layer, x):
        return layer(x) + layer.down(layer.up(x))


@model
class AMethod(Stack):
    """Blocks are not called: a method of theirs is."""

    class Methodical(Mlp):
        def mix(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    block = Methodical

    def run(self, layer, x):
        return layer.mix(x)


@model
class ForwardItself(Stack):
    """`layer.forward(x)`, past every hook."""

    def run(self, layer, x):
        return layer.forward(x)


@model
class AWeightOutside(Stack):
    def run(self, layer, x):
        return layer(x) + F.linear(x, layer.up.weight).mean(-1, keepdim=True)


@model
class AWeightByMatmul(Stack):
    def run(self, layer, x):
        return layer(x) + (x @ layer.up.weight.T).mean(-1, keepdim=True)


@model
class ANarrowWeightOutside(Stack):
    """[1, n] has as many elements as [n]: a flat one would broadcast."""

    class Narrow(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 1, bias=False)

    block = Narrow

    def run(self, layer, x):
        return layer(x) + layer.gate(x)


@model
class AScaleOutside(Stack):
    """An elementwise use of a weight of a block, from outside."""

    def run(self, layer, x):
        return layer(x) * layer.norm.weight


@model
class ANormOfWeights(Stack):
    """Elementwise and summed: a regularizer inside the model."""

    def forward(self, ids):
        return super().forward(ids) + sum(layer.up.weight.square().sum() for layer in self.layers) * 0.01


# -- what layers are -----------------------------------------------------------------------------------------------


@model
class MaxNorm(Stack):
    """`nn.Embedding(max_norm=...)` writes to its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, max_norm=1.0)


@model
class MaxNormInABlock(Stack):
    class Looked(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(5, WIDTH, max_norm=0.5)

        def forward(self, x):
            return super().forward(x + self.places(torch.arange(x.shape[1])))

    block = Looked


@model
class TiedHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@model
class HeadByTheEmbedding(Stack):
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


@model
class TiedBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


@model
class OneBlockThrice(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]])

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = self.layers[0](x)
        return self.head(x)


@model
class Recurrent(Stack):
    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2)

        def forward(self, x):
            return x + self.lstm(x)[0]

    block = Lstm


@model
class Gru(Stack):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
            self.down = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(self.gru(x)[0])

    block = Cell


@model
class Attention(Stack):
    class Attends(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            return super().forward(x + self.attention(x, x, x)[0])

    block = Attends


@model
class TorchsEncoder(Stack):
    @staticmethod
    def block():
        return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)


@model
class Parametrized(Stack):
    class Orthogonal(Mlp):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.up)

    block = Orthogonal


@model
class SpectralNorm(Stack):
    class Spectral(Mlp):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.spectral_norm(self.up)

    block = Spectral


@model
class OldWeightNorm(Stack):
    class Normed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.weight_norm(self.up)

    block = Normed


@model
class Lists(Stack):
    """ParameterList and ParameterDict."""

    class Listed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(())])
            self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH)})

        def forward(self, x):
            return super().forward(x * self.scales[0] * self.scales[1] + self.shifts["a"])

    block = Listed


@model
class Bags(Stack):
    class Bag(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, WIDTH)

        def forward(self, x):
            return super().forward(x + self.bag(torch.tensor([[0, 1], [3, 4]])).mean(0))

    block = Bag


@model
class Convolution(Stack):
    class Convolved(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

        def forward(self, x):
            return super().forward(x + self.conv(x.transpose(1, 2)).transpose(1, 2))

    block = Convolved


@model
class NoParametersInABlock(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Tanh())


@model
class CastsItsRouter(Stack):
    """As Switch Transformers: a layer is cast in forward, whatever the model's dtype."""

    class Routed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 1)

        def forward(self, x):
            self.router = self.router.to(torch.float32)
            return super().forward(x) * self.router(x.float()).sigmoid().to(x.dtype)

    block = Routed


@model
class BlocksInBlocks(Stack):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Mlp(), Mlp()])

        def forward(self, x):
            for layer in self.inner:
                x = layer(x)
            return x

    block = Nested


@model
class InSequence(nn.Module):
    """No ModuleList at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(WORDS, WIDTH), Mlp(), Mlp(), nn.Linear(WIDTH, WORDS))

    def forward(self, ids):
        return self.body(ids)


@model
class ByName(Stack):
    """Blocks are found by `getattr`, parameters by `dict(named_parameters())`."""

    def forward(self, ids):
        x = self.embed(ids)
        for i in range(3):
            x = self.get_submodule(f"layers.{i}")(x)
        return F.linear(x, self.head.weight, dict(self.named_parameters())["head.bias"])


@model
class ACachedWeight(Stack):
    """A weight kept in a list of one's own, as weight-tying code does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.embed.weight]

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.kept[0].T
