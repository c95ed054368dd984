"""The linear seam: one way through which every linear layer computes, whoever cuts, quantises, shards or defers it.

A layer is a *rule* (`cai_mesh.protocols.LinearRule`): forward; the gradient of the input, started and waited for only
after the weight's gradient has been issued, so that its communication runs beside that; and the weight's gradient. A
rule stands on *products*, the layer's three matrix products as plain functions: torch's (`PLAIN`), or those of a
kernel. Tensor parallelism puts communication around them. Where the weight's gradient goes is not the rule's business:
into its chunk (`GradBuffer`), there and then or later (`defer`), in the chunk's dtype; or to autograd, where the weight
has no chunk.

Whoever has a say installs it with `route`, which replaces a module's `forward` once; nobody replaces another's.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cai_mesh.errors import PlanError
from cai_mesh.gradients.buffer import buffer_of, has_hooks
from cai_mesh.gradients.linear.embedding import route_embedding
from cai_mesh.gradients.linear.products import PLAIN, TRANSPOSED
from cai_mesh.operators import operator
from cai_mesh.protocols import LinearProducts, LinearRule, TensorHandle

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Ready:
    """A `TensorHandle` of a tensor that is there."""

    tensor: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        return self.tensor


@dataclass(frozen=True)
class Local:
    """The rule of a layer that ranks do not share: its products and nothing else. Other rules extend it.

    Args:
        products: the layer's matrix products.
    """

    products: LinearProducts

    @property
    def key(self) -> str:
        return self.products.key

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        return self.products.forward(x, weight, bias)

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        dx, operands, db = self.products.backward(dy, weight, saved, **needs)
        return Ready(dx), operands, db

    def weight_grad(self, operands: Tensors) -> torch.Tensor:
        return self.products.weight_grad(operands)

    def write_weight_grad(self, operands: Tensors, out: torch.Tensor, *, fresh: bool) -> None:
        self.products.write_weight_grad(operands, out, fresh=fresh)


LOCAL = Local(PLAIN)

_RULES: dict[str, LinearRule] = {}
"""Rules by key: an operator takes text, not rules. Copies, so that no model is kept alive."""


def register(rule: LinearRule) -> LinearRule:
    """Make a rule known to compiled graphs, under its key; `route` does it by itself. Returns the rule."""
    if rule.key not in _RULES:
        readers = getattr(rule, "readers", None)  # they know modules: not for a weight's gradient
        _RULES[rule.key] = copy.deepcopy(rule, {} if readers is None else {id(readers): None})
    return rule


register(LOCAL)


# -- the weight's gradient ---------------------------------------------------------------------------------------


@operator("cai_mesh::weight_gradient", fake=lambda *_: None, mutates=("token",))
def _weight_gradient(token: torch.Tensor, grad: torch.Tensor, operands: list[torch.Tensor], key: str) -> None:
    """Write a weight's gradient to the buffer of which `grad` is a view, from inside a compiled graph.

    The write to `grad` is not part of the schema: a compiler would give the operator a copy to write to. That to
    `token`, one element that nobody reads, is: it keeps the call in the graph, and two equal ones from being one.
    """
    add_weight_gradient(grad, operands, key)


def add_weight_gradient(grad: torch.Tensor, operands: list[torch.Tensor], key: str) -> None:
    """Write a weight's gradient into the buffer of which `grad` is a view, for operators of compiled graphs.

    Args:
        operands: the operands of the rule's `write_weight_grad`, borrowed.
        key: the key of a rule that is registered.

    Raises `PlanError` where the gradient is not to go there.
    """
    if not grad.numel():  # a rank without rows of the weight
        return
    buffer = buffer_of(grad)
    if buffer is None:
        raise RuntimeError("a weight gradient was to be written to a copy of its chunk; please report this")
    if buffer.takes(grad.storage_offset()) is None:
        raise PlanError(
            "torch.autograd.grad was asked through compiled blocks whose weight gradients go into chunks",
            fix="do not compile the blocks, or call backward()",
        )
    buffer.add(grad.storage_offset(), _RULES[key], tuple(operands), borrowed=True)


def _deliver(
    grad: torch.Tensor, token: torch.Tensor, rule: LinearRule, operands: Tensors
) -> torch.Tensor | None:
    """Write a weight's gradient to its chunk; or return it, where `torch.autograd.grad` wants to have it."""
    if torch.compiler.is_compiling():
        _weight_gradient(token, grad, list(operands), rule.key)
        return None
    if not grad.numel():  # a rank without rows of the weight
        return None
    buffer = buffer_of(grad)
    assert buffer is not None
    if buffer.takes(grad.storage_offset()) is None:
        return rule.weight_grad(operands)
    buffer.add(grad.storage_offset(), rule, operands)
    return None


# -- the layer ---------------------------------------------------------------------------------------------------


def _own(y: torch.Tensor) -> torch.Tensor:
    """`y` as no view of anything: what follows may change it in place, as it may what torch's layer returns."""
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    return torch.ops.aten._unsafe_view.default(y, y.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, grad, token, rule):
        y, saved = rule.forward(x, weight, bias)
        _Linear.keep(ctx, weight, saved, rule, grad, token)
        return _own(y)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Linear.differentiable(ctx, dy)
        weight, saved = _Linear.saved(ctx)
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx, operands, db = ctx.rule.backward(
            dy,
            weight,
            tuple(saved),
            needs_input=needs_input,
            needs_weight=needs_weight,
            needs_bias=needs_bias,
        )
        dw = _Linear.weight_grad(ctx, operands) if needs_weight else None
        return dx.wait(), dw, db, None, None, None

    @staticmethod
    def weight_grad(ctx, operands):
        """The weight's gradient for autograd, which casts it to the weight's dtype; None where its chunk has got it."""
        if ctx.grad is None:
            return ctx.rule.weight_grad(operands)
        return _deliver(ctx.grad, ctx.token, ctx.rule, operands)

    @staticmethod
    def keep(ctx, weight, saved, rule, grad, token):
        # a first layer's weight is not looked at in backward, and may have left by then
        ctx.weight = None if ctx.needs_input_grad[0] else weight
        ctx.save_for_backward(*((weight,) if ctx.weight is None else ()), *saved)
        ctx.rule, ctx.grad, ctx.token = rule, grad, token  # not saved: writing to it would count as a change

    @staticmethod
    def saved(ctx):
        """The weight, and what the rule has saved."""
        if ctx.weight is not None:
            return ctx.weight, ctx.saved_tensors
        weight, *saved = ctx.saved_tensors
        return weight, saved

    @staticmethod
    def differentiable(ctx, dy):
        """The same with `create_graph`: by operators that autograd can differentiate again, nothing into a chunk."""
        if type(ctx.rule) is not Local or ctx.rule.products not in (PLAIN, TRANSPOSED):
            raise PlanError(
                "a linear layer of this kind has no second derivatives",
                got=ctx.rule.key,
                fix="leave out create_graph=True, or build the model without kernels and tensor parallelism",
            )
        weight, (x,) = _Linear.saved(ctx)
        transposed = ctx.rule.products is TRANSPOSED
        rows = dy.reshape(-1, dy.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        dx = dy @ (weight.t() if transposed else weight)
        dw = inputs.t() @ rows if transposed else rows.t() @ inputs
        needs = ctx.needs_input_grad
        return (
            dx if needs[0] else None,
            dw if needs[1] else None,
            rows.sum(0) if needs[2] else None,
            None,
            None,
            None,
        )


class _Reading(torch.autograd.Function):
    """One of several layers that read `x`: what it has read is handed on, and its gradient goes to `source`."""

    @staticmethod
    def forward(ctx, source, x, weight, bias, grad, token, rule, how, product):
        y, saved = rule.forward(x, weight, bias) if product is None else rule.of_product(product, x, bias)
        ctx.weight = None
        ctx.save_for_backward(weight, *saved)
        ctx.rule, ctx.grad, ctx.token = rule, grad, token
        ctx.first, ctx.part = how
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # graphs leave out what adds zeros
        return _own(y), x.view_as(x)

    @staticmethod
    def backward(ctx, dy, other_dx):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*_Linear.differentiable(ctx, dy), None, None, None)  # refuses it
        weight, saved = _Linear.saved(ctx)
        needs_input, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        operands, db, dw = (), None, None
        if dy is None:  # what it made was not used
            dx = None if other_dx is None else other_dx.clone()
        else:
            dx, operands, db = ctx.rule.own_gradients(
                dy,
                weight,
                tuple(saved),
                needs_input=needs_input,
                needs_weight=needs_weight,
                needs_bias=needs_bias,
            )
            if dx is not None and other_dx is not None:
                dx = dx.add_(other_dx)
        needs_weight = needs_weight and dy is not None
        sums = ctx.first and dx is not None
        if sums and needs_weight and ctx.part and ctx.grad is not None and _is_one_operator(ctx.rule):
            dx = ctx.rule.scatter_beside(dx, ctx.grad, ctx.token, operands)
            return dx, None, None, db, None, None, None, None, None
        summed = ctx.rule.start_input_sum(dx, scattered=ctx.part) if sums else Ready(dx)
        if needs_weight:
            dw = _Linear.weight_grad(ctx, operands)
        return summed.wait(), None, dw, db, None, None, None, None, None


def _is_one_operator(rule: LinearRule) -> bool:
    """Whether the scattered sum and the weight's gradient are one operator: a compiler might part two."""
    return torch.compiler.is_compiling() and getattr(rule, "overlap", False)


def _under_autocast(t: torch.Tensor, device: str) -> torch.Tensor:
    wide = not t.is_floating_point() or t.dtype == torch.float64
    return t if wide else t.to(torch.get_autocast_dtype(device))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, rule: LinearRule = LOCAL
) -> torch.Tensor:
    """A linear layer of x [..., in] by its rule; the gradient of weight [out, in] goes into its `GradBuffer`, if any.

    Differentiable twice where its products are torch's own. Under autocast x, weight and bias are cast first, and then,
    or where the weight has no buffer or carries gradient hooks, autograd gets its gradient. What is left of torch's
    own layer takes torch's own path.
    """
    grad, token = getattr(weight, "cai_grad", None), getattr(weight, "cai_token", None)
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast or not torch.is_grad_enabled() or has_hooks(weight):
        grad = token = None
    if rule is LOCAL and (grad is None or x.dim() < 2):
        return F.linear(x, weight, bias)
    readers = getattr(rule, "readers", None)
    reading = None if readers is None or x.dim() < 2 else readers.take(x)
    product = None if readers is None or reading is None else readers.take_made(x, rule)
    if autocast:
        x, weight = (_under_autocast(t, x.device.type) for t in (x, weight))
        bias = None if bias is None else _under_autocast(bias, x.device.type)
    if readers is not None and reading is not None:
        y, handed_on = _Reading.apply(
            reading.source,
            x.detach(),
            weight,
            bias,
            grad,
            token,
            rule,
            (reading.first, reading.part),
            product,
        )
        readers.hand_on(handed_on)
        return y
    if x.dim() < 2:
        return _Linear.apply(x.unsqueeze(0), weight, bias, grad, token, rule).squeeze(0)
    return _Linear.apply(x, weight, bias, grad, token, rule)


# -- modules -----------------------------------------------------------------------------------------------------


def _forward(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
    return linear(input, self.weight, self.bias, self.cai_rule)


def _run_products(self: nn.Module, products: LinearProducts | None, input: torch.Tensor) -> torch.Tensor:
    """Apply `products` (None: the layer's own) to `input` and this module's weight, through the seam.

    Other products than the layer's own are not known to compiled graphs.
    """
    rule = self.cai_rule
    if products is not None and products is not rule.products:
        if type(rule) is not Local:
            raise PlanError(
                "a layer that ranks share was asked for other products than its own",
                got=f"{products.key} of a layer with {rule.key}",
                fix="put kernels into the model before parallelize",
            )
        rule = Local(products)
    return linear(input, self.weight, self.bias, rule)


def by_rule(module: nn.Module, rule: LinearRule, input: torch.Tensor) -> torch.Tensor:
    """Return what another rule than a linear layer's own makes of `input` [..., in], through the seam."""
    return linear(input, module.weight, module.bias, rule)  # type: ignore[arg-type]


def own_products(module: nn.Module) -> LinearProducts | None:
    """The products of a linear layer: torch's, those it brings as `linear_products`, or None for anything else.

    Conv1D is GPT-2's layer of transformers, with a weight [in, out]; FalconLinear is torch's, product and bias one
    after the other. Another subclass with a forward of its own that brings no products is something else.
    """
    brought = getattr(module, "linear_products", None)
    if brought is not None:
        return brought
    kind = type(module)
    plain = kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"
    if isinstance(module, nn.Linear) and plain:
        return PLAIN
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return TRANSPOSED
    return None


def _calls_products(module: nn.Module) -> bool:
    """Whether the module's forward asks for `run_products` by itself: one of its class, or put there by a kernel."""
    if "forward" in module.__dict__:
        return _has_kernel(module)
    return getattr(module, "linear_products", None) is not None


def _has_kernel(module: nn.Module) -> bool:
    """Whether a kernel that calls `run_products`, perhaps with products of its own, has replaced the forward."""
    return getattr(module.__dict__.get("forward"), "calls_run_products", False)


def routed(module: nn.Module) -> LinearRule | None:
    """The rule by which a module computes through the seam, if it does."""
    return module.__dict__.get("cai_rule")


def route(module: nn.Module, rule: LinearRule | None = None) -> bool:
    """Let a linear layer compute through the seam; returns False, with nothing changed, for what cannot.

    Args:
        module: an `nn.Linear` or Conv1D without a forward of its own, or a layer that brings `linear_products` and
            calls `self.run_products` where it is there. A kernel that has replaced the forward may call it too, if the
            forward has an attribute `calls_run_products`; such a layer cannot be shared by ranks.
        rule: the rule by which it computes from now on; None leaves the one it has, at first `Local` of its products.
    """
    if rule is not None and type(rule) is not Local and _has_kernel(module):
        return False
    if routed(module) is None:
        products = own_products(module)
        replaced = "forward" in module.__dict__
        if products is None or (replaced and not _calls_products(module)):
            return False
        module.cai_rule = LOCAL if products is PLAIN else register(Local(products))  # type: ignore[assignment]
        module.run_products = types.MethodType(_run_products, module)  # type: ignore[assignment]
        if not _calls_products(module):
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
    if rule is not None:
        module.cai_rule = register(rule)  # type: ignore[assignment]
    return True


def direct_linears(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Let linear layers and embeddings below `model` whose weights are among `params` write gradients to chunks.

    Layers with a forward of their own, and weights that carry gradient hooks, stay as they are.
    """
    param_ids = {id(p) for p in params}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in param_ids and not has_hooks(weight) and not route(module):
            route_embedding(module)
