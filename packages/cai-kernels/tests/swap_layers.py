"""Modules for the tests of `swap`: sound ones, and ones that a trial on some values would take for them."""

from __future__ import annotations

import functools
import random

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(kind):
    """A norm of torch with weights that are not one."""

    def build():
        module = kind(WIDTH)
        for param in module.parameters():
            nn.init.normal_(param, 0.5, 0.2)
        return module

    return build


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(WIDTH)), 1e-5

    def normalized(self, x):
        wide = x.to(torch.float32)
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states):
        return self.weight * self.normalized(hidden_states).to(hidden_states.dtype)


class Scaled(Llama):
    scale = 1.0

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.scale


class GatedFirst(Llama):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


class GatedLast(Llama):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * F.silu(gate)


class Dropped(Llama):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class ByMode(Llama):
    def forward(self, x):
        return super().forward(x) * (1 if self.training else 2)


class Clamped(Llama):
    def forward(self, x):
        return super().forward(x.clamp(-500, 500))


class ByLength(Llama):
    def forward(self, x):
        return super().forward(x) * (2 if x.shape[-2] > 800 else 1)


class ByLengthWithoutBranch(Llama):
    def forward(self, x):
        return super().forward(x) * (1 + x.shape[-2] // 800)


class ByValue(Llama):
    def forward(self, x):
        return super().forward(x) if x.abs().max() < 1e5 else x


class Counting(Llama):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 3 else 2)


class Buffered(Llama):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.seen


class Detached(Llama):
    def forward(self, x):
        return super().forward(x.detach())


class InPlace(Llama):
    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            x += 0
        return y


class NoGrad(Llama):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Chance(Llama):
    def forward(self, x):
        return super().forward(x) * (2 if random.random() > 2 else 1) + torch.rand(()) * 0


class Mlp(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class ScaledMlp(Mlp):
    scale, twice = 1.0, False

    def forward(self, x):
        y = self.down(self.act(self.gate(x)) * self.up(x)) * self.scale
        return y + y if self.twice else y


class Dropping(Mlp):
    def forward(self, x):
        return F.dropout(self.down(self.act(self.gate(x)) * self.up(x)), 0.5, self.training)


class Wide(Mlp):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)[..., :1])


class Calls(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.calls


class Noisy(Mlp):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) * torch.rand(WIDTH)


class Overwriting(Mlp):
    def forward(self, x):
        gate = self.gate(x)
        value = self.act(gate)
        gate.mul_(2)
        return self.down(value * self.up(x))


class Asking(Mlp):
    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = x * 2
        return self.down(self.act(self.gate(x)) * self.up(x))


class Act(nn.Module):
    """SiLU where a trial from -6 to 6 looks."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x):
        y = F.silu(x)
        if self.kind == "threshold":
            return torch.where(x > 50, torch.full_like(x, 50.0), y)
        if self.kind == "mode":
            return y if self.training else y * 2
        if self.kind == "dropout":
            return F.dropout(y, 0.5, self.training) if x.dim() > 1 else y
        if self.kind == "length":
            return y * (2 if x.shape[0] > 2 and x.dim() > 1 else 1)
        self.calls += 1
        return y * (1 if self.calls < 30 else 2)


class Rotary(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        forwards = {"plain": Plain, "by length": Long, "by value": Large, "random": Random}
        forwards |= {"decorated": Decorated, "decorated by an object": DecoratedByAnObject}
        self.__class__ = forwards[kind]


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_plain(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def rotate_long(q, k, cos, sin):
    return rotate_plain(q, k * (2 if k.shape[2] > 30 else 1), cos, sin)


def rotate_large(q, k, cos, sin):
    return rotate_plain(q, k.clamp(-100, 100), cos, sin)


def rotate_random(q, k, cos, sin):
    return rotate_plain(q, k * (1 + torch.rand(()) * 1e-9), cos, sin)


def table(x, form="") -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(x.shape[2])[:, None] / torch.arange(1, 5)
    angle = torch.cat((angle, angle * 2 if form == "uneven" else angle), -1)[None].to(x.dtype)
    return angle.cos(), angle.sin()


class Plain(Rotary):
    def forward(self, q, k, form=""):
        cos, sin = table(q, form)
        if form == "positional":
            q, k = rotate_plain(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
            return q.transpose(1, 2), k.transpose(1, 2)
        if form == "keyword":
            return rotate_plain(q=q, k=k, cos=cos, sin=sin, unsqueeze_dim=1)
        if form == "mixed":
            return rotate_plain(q.bfloat16(), k.bfloat16(), cos, sin)
        return rotate_plain(q, k, cos, sin)


def renamed(function):
    @functools.wraps(function)
    def called(*args, **kwargs):
        if "kind" in kwargs:
            kwargs["form"] = kwargs.pop("kind")
        return function(*args, **kwargs)

    return called


class Decorated(Rotary):
    """As Transformers decorates forwards whose arguments have new names."""

    @torch.enable_grad()
    @renamed
    def forward(self, q, k, form=""):
        return rotate_plain(q, k, *table(q, form))


class Held:
    """A decorator that is an object."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, module, kind=None):
        return self if module is None else functools.partial(self, module)


class DecoratedByAnObject(Rotary):
    @Held
    def forward(self, q, k):
        return rotate_plain(q, k, *table(q))


class Long(Rotary):
    def forward(self, q, k):
        return rotate_long(q, k, *table(q))


class Large(Rotary):
    def forward(self, q, k):
        return rotate_large(q, k, *table(q))


class Random(Rotary):
    def forward(self, q, k):
        return rotate_random(q, k, *table(q))


NORMS = (Dropped, ByMode, Clamped, ByLength, ByLengthWithoutBranch, ByValue, Counting, Buffered, Detached, InPlace,
         NoGrad, Chance)  # fmt: skip
MLPS = (Calls, Noisy, Overwriting, Asking)
ACTS = ("threshold", "mode", "dropout", "length", "calls")
ODD = {c.__name__: c for c in (*NORMS, *MLPS)} | {
    f"activation by {k}": (lambda k=k: Mlp(Act(k))) for k in ACTS
}
