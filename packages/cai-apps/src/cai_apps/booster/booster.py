"""The booster: a user's model, optimizer and loop on the ranks of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cai_apps.booster.adapters import add_lora, adopt_lora, save_lora
from cai_apps.booster.bare import Bare, names_of
from cai_apps.booster.checkpoints import (
    MB,
    load_model,
    load_optimizer,
    load_schedule,
    save_model,
    save_optimizer,
    save_schedule,
)
from cai_apps.booster.config import BoostConfig
from cai_apps.booster.launch import need_launch, rank_device
from cai_apps.booster.model import BoostedModel
from cai_apps.booster.optimizer import BoostedOptimizer
from cai_apps.booster.pipeline import Pipeline, has_last_stage
from cai_apps.booster.plugin import Plugin
from cai_apps.booster.plugins import TorchDDPPlugin
from cai_apps.booster.rows import Rows
from cai_mesh.comm import ParallelMesh
from cai_mesh.errors import ConfigError


class Booster:
    """Trains a user's model in a user's loop, as a plugin says: divided over ranks, in fewer bits, in host memory.

        launch()
        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
        model, optimizer, criterion, loader, schedule = booster.boost(model, optimizer, criterion, loader, schedule)
        for batch in loader:
            loss = criterion(model(**batch), batch)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        device: unused: `launch` has chosen the device.
        mixed_precision: "fp16", "bf16" or "fp8", for a plugin without a precision of its own.
        plugin: the plugin; None: data parallelism (`TorchDDPPlugin`).

    Raises:
        ConfigError: the ranks are not joined, or precision is said twice.
    """

    def __init__(self, device: Any = None, mixed_precision: str | None = None, plugin: Plugin | None = None):
        need_launch("Booster")
        self.plugin = TorchDDPPlugin() if plugin is None else plugin
        self.config = with_precision(self.plugin, mixed_precision)
        size = getattr(self.plugin, "microbatch_size", None)
        counted = self.plugin.to_config().parallel.pipeline.microbatches is not None
        self._pipeline = Pipeline(self.config, self.plugin.mesh, None if counted else size)

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Put a model and its optimizer on the ranks, in place. Collective.

        Args:
            model: the whole module, on any device; alike on all ranks, or else the first rank's.
            optimizer: an optimizer over its parameters that has not stepped yet; None: the model is only run.
            criterion, dataloader, lr_scheduler: returned as they are; a schedule of the optimizer goes on.

        Returns the boosted model and optimizer, and the three others.

        Raises:
            CaiError: the model cannot be divided so.
        """
        bare = Bare(self.config, self.plugin.mesh, rank_device())
        if optimizer is not None:
            adopt_lora(optimizer, model)
        names = [] if optimizer is None else names_of(optimizer, model)
        bare.transform(model)
        weights = bare.place(model, optimizer, names)
        mesh = ParallelMesh.of(self.plugin.mesh)
        boosted = wrapped(model, bare, mesh)
        if optimizer is not None and weights is not None:
            optimizer = BoostedOptimizer(optimizer, boosted, weights, self.config, self.plugin.mesh)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Add the gradients of a loss to those of the coming step.

        Raises:
            ConfigError: the model is divided over the ranks of a pipeline.
        """
        _boosted(optimizer, BoostedOptimizer, "backward").backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: BoostedModel,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of the next batch through the stages of a pipeline. Collective.

        Args:
            data_iter: an iterator of batches: mappings of the model's arguments by name.
            model: the boosted model.
            criterion: (output of the model, microbatch) -> the mean loss of a microbatch; called on the last stage.
            optimizer: the boosted optimizer; None, or without gradients: forward only.
            return_loss: whether the loss is returned: the mean over microbatches, of this data rank, on every rank.
            return_outputs: whether what the model returns is kept, on the rank of the last stage.

        Returns {"loss": ..., "outputs": ...}.

        Raises:
            ConfigError: there is no pipeline, or the batch does not divide into microbatches.
        """
        if self.config.parallel.pipeline.size == 1:
            raise ConfigError(
                "there is no pipeline to execute",
                got=f"{type(self.plugin).__name__} with one stage",
                fix="loss = criterion(model(**batch), batch); booster.backward(loss, optimizer); or raise pp_size",
            )
        _boosted(model, BoostedModel, "execute_pipeline")
        loss, outputs = self._pipeline.step(
            data_iter, model, criterion, optimizer, keeps_outputs=return_outputs
        )
        return {
            "loss": loss if return_loss else None,
            "outputs": outputs if has_last_stage(model) else None,
        }

    def no_sync(
        self, model: BoostedModel | None = None, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which backwards only add up gradients; the next one outside reduces them all."""
        if optimizer is not None:
            return _boosted(optimizer, BoostedOptimizer, "no_sync").no_sync()
        return _boosted(model, BoostedModel, "no_sync").no_sync()

    # -- adapters ----------------------------------------------------------------------------------------------------

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Put adapters beside layers of a model, in place, and freeze everything else. Before `boost`.

        Args:
            model: a whole model of transformers.
            pretrained_dir: a folder of peft, whose options and weights are taken; None: new ones.
            lora_config: `peft.LoraConfig` of new adapters.
            bnb_quantization_config, quantize: not here: `cai train` quantizes bases (`lora.base`).

        Returns the model.

        Raises:
            ConfigError: neither is given, or a base in codes is asked for.
        """
        if quantize or bnb_quantization_config is not None:
            raise ConfigError(
                "a booster quantizes no base",
                got=f"quantize = {quantize}",
                fix='`cai train` with lora.base = "nf4"; or leave quantize out',
            )
        return add_lora(model, None if pretrained_dir is None else Path(pretrained_dir), lora_config)

    def save_lora_as_pretrained(
        self, model: BoostedModel, checkpoint: str | Path, use_safetensors: bool = False
    ) -> None:
        """Write a model's adapters as a folder of peft, of safetensors always. Collective."""
        save_lora(_boosted(model, BoostedModel, "save_lora_as_pretrained"), Path(checkpoint))

    # -- files -------------------------------------------------------------------------------------------------------

    def save_model(
        self,
        model: BoostedModel,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write a model's weights, in the dtype of computation, as safetensors whatever the path ends with. Collective.

        Args:
            model: the boosted model.
            checkpoint: a file; with `shard` a directory as `save_pretrained` makes it, whose other files stay.
            shard: whether a directory is written.
            gather_dtensor: unused: files hold whole tensors.
            prefix: the beginning of the names of tensors.
            size_per_shard: MiB of a file of the directory.
            use_safetensors: unused: files are safetensors.
            use_async: unused: the files are complete on return.
        """
        module = _boosted(model, BoostedModel, "save_model").module
        options = {"shard": shard, "file_bytes": size_per_shard * MB, "prefix": prefix or ""}
        save_model(module, Path(checkpoint), model.compute, **options)

    def load_model(
        self,
        model: BoostedModel,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Fill a model, on any ranks, from safetensors or from a checkpoint of `cai train`. Collective.

        Args:
            model: the boosted model.
            checkpoint: a file, or a directory.
            strict: whether all parameters must be there.
            low_cpu_mem_mode, num_threads: unused: each rank reads its parts.

        Raises:
            CheckpointError: it is a pickle, or of another model.
        """
        load_model(_boosted(model, BoostedModel, "load_model").module, Path(checkpoint), strict=strict)

    def save_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write an optimizer's state, master weights and loss scale into a directory, for any plugin. Collective.

        Args:
            optimizer: the boosted optimizer.
            checkpoint: the directory; what an earlier call has written there is replaced.
            shard, gather_dtensor, prefix, size_per_shard, use_async: unused: each rank writes what it has.
        """
        save_optimizer(_boosted(optimizer, BoostedOptimizer, "save_optimizer"), Path(checkpoint))

    def load_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Fill an optimizer from what `save_optimizer` has written under any plugin. Collective.

        Args:
            optimizer: the boosted optimizer.
            checkpoint: the directory.
            low_cpu_mem_mode, num_threads: unused: each rank reads its parts.
        """
        load_optimizer(_boosted(optimizer, BoostedOptimizer, "load_optimizer"), Path(checkpoint))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Write where a schedule of learning rates stands. Collective."""
        save_schedule(lr_scheduler, Path(checkpoint))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Let a schedule of learning rates go on from where it stood."""
        load_schedule(lr_scheduler, Path(checkpoint))


def wrapped(model: nn.Module, bare: Bare, mesh: ParallelMesh) -> BoostedModel:
    """Return the boosted model of a module on its ranks."""
    config = bare.config
    boosted = BoostedModel(
        model,
        device=bare.device,
        compute=bare.compute if config.casts_inputs else None,
        outputs=torch.float32 if config.outputs == "fp32" else None,
        rows=Rows(mesh) if config.parallel.context.size > 1 else None,
    )
    boosted.piped = config.parallel.pipeline.size > 1
    return boosted


def with_precision(plugin: Plugin, mixed_precision: Any) -> BoostConfig:
    """Return a plugin's config with the precision of the booster.

    Raises:
        ConfigError: it is unknown, or the plugin has one of its own.
    """
    config = plugin.config
    if mixed_precision is None:
        return config
    named = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
    if mixed_precision not in named:
        raise ConfigError(
            "unknown mixed_precision", got=repr(mixed_precision), expected=", ".join(map(repr, named))
        )
    if hasattr(type(plugin), "precision") or not isinstance(plugin, TorchDDPPlugin):
        raise ConfigError(
            f"{type(plugin).__name__} has a precision of its own",
            got=f"mixed_precision = {mixed_precision!r}",
            fix=f"{type(plugin).__name__}(..., precision={mixed_precision!r}), and leave mixed_precision out",
        )
    linear = "fp8" if mixed_precision == "fp8" else "compute"
    precision = replace(config.precision, compute=named[mixed_precision], linear=linear)
    return replace(config, precision=precision, outputs="fp32")


def _boosted(value: Any, kind: type, verb: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{verb} takes what boost returns",
            got=type(value).__name__,
            expected=kind.__name__,
            fix="model, optimizer, *rest = booster.boost(model, optimizer, ...)",
        )
    return value
