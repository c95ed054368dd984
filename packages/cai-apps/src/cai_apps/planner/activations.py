"""Bytes that a forward keeps for backward, found by running it on tensors without storage.

What runs is what `cai_apps.compose.apply.rewrite` makes of the model: its kernels, tensor-parallel layers and loss.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cai_apps.compose.apply import is_compiled, rewrite
from cai_apps.compose.blocks import is_attention, is_product
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Workload, on_meta, own_part
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec
from cai_apps.planner.graphs import divide
from cai_apps.planner.routers import router_bytes
from cai_apps.planner.world import imaginary_rank
from cai_kernels import planning_for
from cai_mesh.errors import CaiError, PlanError
from cai_pipeline import run_stage

REST = ""
"""Name of what lies outside all blocks: embeddings, final norm, head and loss."""


@dataclass(frozen=True)
class Saved:
    """What the forward of one microbatch on a tensor-parallel rank leaves, in bytes by name of the block.

    Args:
        kept: saved for backward without recompute. Parameters and what another block has saved are not counted.
        products: results of matrix products and attention, which selective recompute keeps.
        attention: results of attention, which recompute of most keeps.
        inputs: inputs of the block, which recompute starts from.
        rest: saved outside blocks.
        loss: tensors that come and go outside blocks, at the fullest moment; mostly the loss.
    """

    kept: dict[str, int]
    products: dict[str, int]
    attention: dict[str, int]
    inputs: dict[str, int]
    rest: int
    loss: int

    def times(self, factor: int) -> Saved:
        """Return the same with `factor` times the bytes."""
        by_block = (
            {name: size * factor for name, size in of.items()}
            for of in (self.kept, self.products, self.attention, self.inputs)
        )
        return Saved(*by_block, self.rest * factor, self.loss * factor)

    def plus(self, by_name: Mapping[str, int]) -> Saved:
        """Return the same with more bytes of blocks, which recompute keeps too; those of no block are of the rest."""
        blocks = {name: size for name, size in by_name.items() if name in self.inputs}
        rest = sum(size for name, size in by_name.items() if name not in blocks)
        more = [
            {name: size + blocks.get(name, 0) for name, size in of.items()} for of in (self.kept, self.inputs)
        ]
        return replace(self, kept=more[0], inputs=more[1], rest=self.rest + rest)


def saved_bytes(config: RunConfig, workload: Workload, device: torch.device) -> Saved:
    """Return the bytes that the forward of a resolved config keeps, with all stages on one rank.

    Where operators have no form without values in the run's dtype (experts have none in float64), sizes are those of
    bfloat16, scaled.

    Args:
        device: the device that the run will be on; it decides on kernels and graphs.

    Raises what the transforms raise, and `PlanError` where sizes depend on values.
    """
    pipeline = replace(config.parallel.pipeline, size=1, chunks=1)
    tensor, experts = config.parallel.tensor.size, config.parallel.experts.size
    inner = tensor * config.parallel.context.size
    shard = math.lcm(inner, experts) // inner  # as few as ranks of experts can be
    config = replace(config, parallel=replace(config.parallel, pipeline=pipeline, replicate=1, shard=shard))
    compute = DTYPES[config.precision.compute]
    more = router_bytes(config, workload)
    with imaginary_rank(mesh_spec(config), 0) as mesh, _silence():
        try:
            return _forward(config, workload, mesh, device, compute).plus(more)
        except CaiError:
            raise
        except Exception as error:  # whatever torch or the model raises for want of values
            if compute == torch.bfloat16:
                raise _untold(error) from error
        config = replace(config, precision=replace(config.precision, compute="bf16"))
        try:
            narrow = _forward(config, workload, mesh, device, torch.bfloat16)
            return narrow.times(compute.itemsize // 2).plus(more)
        except Exception as error:
            raise _untold(error) from error


def _untold(error: Exception) -> PlanError:
    return PlanError(
        "what this model keeps for backward cannot be told without running it",
        got=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
        cause="sizes inside it depend on values, or an operator cannot do without them",
        fix="train a few steps and read the memory they report",
    )


def _forward(
    config: RunConfig, workload: Workload, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
) -> Saved:
    model = on_meta(workload)
    loss = rewrite(config, workload, model, mesh, device=device)
    with planning_for(device), FakeTensorMode(allow_non_fake_inputs=True):
        _give_sizes(model, dtype)
        batch = own_part(workload, mesh, workload.example(config.train.microbatch_size))
        watch = _Watch(model, workload.layers(model), graphs=is_compiled(config, device))
        with watch.counting(), workload.running():
            output = run_stage(model.train(), None, workload.inputs(batch))
            loss_value = loss(output, workload.target(batch))
            saved = watch.saved()
        del loss_value  # held until here: the graph keeps alive what is counted
        return saved


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, torch does not print what operators raise on tensors without values; it is raised all the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _give_sizes(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn parameters and buffers on the meta device into ones on the CPU, of the context's fake mode."""
    twins: dict[Tensor, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        kind = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            empty.__dict__.update(
                {name: value for name, value in tensor.__dict__.items() if name.startswith("cai_")}
            )
        return empty

    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = twins.setdefault(tensor, twin(tensor) if tensor not in twins else tensor)


class _Watch:
    """Counts what a forward leaves, block by block.

    Args:
        graphs: blocks will be compiled: what is kept is what torch's partitioner of graphs keeps.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], *, graphs: bool):
        self.kept: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter()
        self._block = REST
        self._seen = {_storage(parameter) for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._operators = _Operators(self)
        self._alive: dict[StorageWeakRef, int] = {}
        self._most = 0
        self._kinds: dict[Any, tuple[str, Any]] = {}
        names = {module: name for name, module in model.named_modules()}
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        self._outside = {p.shape for p in model.parameters() if p.ndim > 1 and p not in inside}
        for layer in layers:
            layer.forward = self._watched(layer, names[layer], graphs)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with self._hooks, self._operators:
            yield

    def saved(self) -> Saved:
        alive = sum(size for ref, size in self._alive.items() if not ref.expired())
        block_bytes = dict(self.kept)
        results = dict(self.products), dict(self.attention)
        return Saved(block_bytes, *results, dict(self.inputs), block_bytes.pop(REST, 0), self._most - alive)

    def _watched(self, block: nn.Module, name: str, graphs: bool) -> Callable[..., Any]:
        forward = block.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._block = name
            input_tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.inputs[name] += sum(t.numel() * t.element_size() for t in input_tensors if t.requires_grad)
            try:
                if not graphs:
                    return forward(*args, **kwargs)
                self._hooks.__exit__()  # what is traced is not what is saved
                self._operators.__exit__(None, None, None)
                try:
                    return self._divided(block, forward, args, kwargs)
                finally:
                    self._operators.__enter__()
                    self._hooks.__enter__()
            finally:
                self._block = REST

        return watched

    def _divided(self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the results of a block's forward and count what its graphs keep; blocks of one kind are traced once.

        One that runs without gradients, as rounds before the last do, keeps nothing.
        """
        input_tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in (*block.parameters(), *input_tensors)]
        learns = torch.is_grad_enabled()
        kind = (type(block), learns, tuple(shapes))
        if kind in self._kinds:
            like, output = self._kinds[kind]
            for counted in (self.kept, self.products, self.attention) if learns else ():
                counted[self._block] = counted[like]
            return tree_map_only(
                Tensor, lambda t: torch.empty_like(t).requires_grad_(t.requires_grad), output
            )
        if not learns:
            output = forward(*args, **kwargs)
            self._kinds[kind] = (self._block, output)
            return output
        output, graph = divide(block, forward, args, kwargs)
        for tensor in graph.inputs:
            self._pack(tensor)
        self.kept[self._block] += graph.made
        self.products[self._block] += graph.products
        self.attention[self._block] += graph.attention
        self._kinds[kind] = (self._block, output)
        return output

    def _pack(self, tensor: Tensor) -> Tensor:
        """Counts what is saved. What a loss saves in the shape of the output layer's weight is its gradient."""
        storage = _storage(tensor)
        gradient = self._block == REST and tensor.shape in self._outside
        if storage not in self._seen and not gradient:
            self._seen.add(storage)
            self.kept[self._block] += tensor.untyped_storage().nbytes()
        return tensor

    def ran(self, operator: Any, result: Any) -> None:
        """Count what an operator that has run outside graphs leaves."""
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device.type != "meta"]
        if self._block != REST:
            size = outputs[0].untyped_storage().nbytes() if outputs and torch.is_grad_enabled() else 0
            self.products[self._block] += is_product(operator) * size
            self.attention[self._block] += is_attention(operator) * size
            return
        for tensor in outputs:
            storage = tensor.untyped_storage()
            self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self._most = max(self._most, sum(self._alive.values()))


class _Operators(TorchDispatchMode):
    """Tells a watch which operators run."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._watch.ran(func, output)
        return output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
