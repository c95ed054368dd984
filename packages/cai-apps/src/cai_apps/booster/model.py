"""The model that `boost` returns: the user's module, called with tensors as its ranks compute with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.booster.rows import Rows
from cai_mesh.errors import ConfigError
from cai_pipeline import PipelineRunner


class BoostedModel(nn.Module):
    """A user's module on its ranks. `module`, or `unwrap()`, is the module itself.

    Args:
        module: the module, after all transforms.
        device: the device of the rank, to which inputs are moved.
        compute: the dtype of floating-point inputs; None: they stay as they are.
        outputs: the dtype of floating-point outputs; None: they stay as they are.
        rows: the way in which ranks have rows of tokens together; None: rows are whole.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        compute: torch.dtype | None = None,
        outputs: torch.dtype | None = None,
        rows: Rows | None = None,
    ):
        super().__init__()
        self.module = module
        self.device, self.compute, self.outputs, self.rows = device, compute, outputs, rows
        self.runners: dict[int, PipelineRunner] = {}
        self.piped = False
        self.deferring: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.piped:
            raise ConfigError(
                "the model is divided over the ranks of a pipeline, and none can run it alone",
                got="model(...)",
                fix="booster.execute_pipeline(iter([batch]), model, criterion, optimizer)",
            )
        args, kwargs = self.ready(args), self.ready(kwargs)
        if self.rows is not None:
            return self.with_dtype(self.rows.call(self.module, args, kwargs), self.outputs)
        return self.with_dtype(self.module(*args, **kwargs), self.outputs)

    def ready(self, inputs: Any) -> Any:
        """Return inputs on the device, in the dtype of computation."""
        return _each(inputs, lambda tensor: _moved(tensor, self.device, self.compute))

    def with_dtype(self, outputs: Any, dtype: torch.dtype | None) -> Any:
        """Return outputs in a dtype; as they are for None."""
        return outputs if dtype is None else _each(outputs, lambda tensor: _moved(tensor, None, dtype))

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's module."""
        return self.module

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only add up gradients."""
        return self.deferring()


def _moved(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    wide = dtype is not None and tensor.is_floating_point()
    return tensor.to(device=device, dtype=dtype if wide else None, non_blocking=True)


def _each(value: Any, change: Any) -> Any:
    """Return a value with its tensors changed, in lists, tuples and mappings of any depth."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: _each(part, change) for name, part in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_each(part, change) for part in value)
    return value
