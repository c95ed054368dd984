"""What a booster writes and reads: models as Hugging Face has them, optimizers for any ranks and plugins, schedules."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.booster.optimizer import BoostedOptimizer
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.published_names import present_tensors
from cai_mesh.checkpoint import Assembly, contents, latest, load, load_hf, save, save_hf, steps
from cai_mesh.comm import all_gather_object
from cai_mesh.errors import CheckpointError
from cai_mesh.layout import BoxedTensor

LOGGER = logging.getLogger("cai_apps.booster")
MB = 1024**2
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of files that usually are pickles."""
GROUPS, SCALE = "groups", "loss_scale"
"""Keys of what an optimizer's checkpoint holds beside tensors."""


# -- models ------------------------------------------------------------------------------------------------------------


def save_model(
    module: nn.Module,
    checkpoint: Path,
    dtype: torch.dtype | None,
    *,
    shard: bool,
    file_bytes: int,
    prefix: str,
) -> None:
    """Write a model as `from_pretrained` reads it, or all of it as one file of safetensors. Collective.

    Args:
        module: the module, on any layout.
        checkpoint: a directory, whose other files stay; or the file.
        dtype: the dtype of floating-point tensors; None: that of each.
        shard: whether it is a directory, of files of at most `file_bytes`.
        file_bytes: bytes of a file.
        prefix: the beginning of the names of tensors.
    """
    final = checkpoint.absolute()
    draft = final.parent / f".{final.name}.saving"
    _on_first(lambda: shutil.rmtree(draft, ignore_errors=True))
    names = partial(_prefixed, prefix) if prefix else lambda name: name
    options: dict[str, Any] = {"tensors": _hub_names(module)} if not prefix else {}
    save_hf(module, draft, dtype=dtype, names=names, max_file_bytes=file_bytes if shard else 2**62, **options)
    _on_first(partial(_replace_files if shard else _replace_file, draft, final))


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}{name}"


def _hub_names(module: nn.Module) -> Any:
    """Return what makes a file's tensors of a model's: by their names on the hub for models of transformers."""
    from transformers import PreTrainedModel

    return partial(saved_tensors, module) if isinstance(module, PreTrainedModel) else _as_they_are


def _as_they_are(shapes: Mapping[str, Any]) -> dict[str, Assembly]:
    return {name: Assembly.of(name, shape) for name, shape in shapes.items()}


def _replace_files(draft: Path, final: Path) -> None:
    final.mkdir(parents=True, exist_ok=True)
    for old in (*final.glob("model*.safetensors"), *final.glob("model*.safetensors.index.json")):
        old.unlink()
    for new in draft.iterdir():
        new.replace(final / new.name)
    draft.rmdir()


def _replace_file(draft: Path, final: Path) -> None:
    file = next(iter(draft.glob("*.safetensors")))
    if final.is_dir():
        raise CheckpointError(f"{final} is a directory", expected="a file", fix="shard=True, or another path")
    file.replace(final)
    shutil.rmtree(draft)


def load_model(module: nn.Module, checkpoint: Path, *, strict: bool) -> list[str]:
    """Fill a model, on any layout, from safetensors or from a checkpoint of a run. Collective.

    Args:
        module: the module.
        checkpoint: a file of safetensors, a directory of them, or a directory step-N, or one of those.
        strict: whether the files must have every parameter.

    Returns the names of parameters that stay as they are because the files lack them.

    Raises:
        CheckpointError: it is a pickle, or of another model.
    """
    if checkpoint.is_dir() and (_is_run(checkpoint)):
        params = {f"model.{name}": boxed for name, boxed in BoxedTensor.of_model(module).items()}
        load(checkpoint, params)
        return []
    directory, file = (checkpoint, None) if checkpoint.is_dir() else (checkpoint.parent, checkpoint.name)
    check_no_pickle(checkpoint)
    tensors = partial(present_tensors, without_memory(module))
    return load_hf(module, directory, file=file, tensors=tensors, strict=strict)


def load_first(module: nn.Module, directory: Path) -> None:
    """Fill a model that was made without memory from its files; a head that these lack is new. Collective.

    Raises:
        CheckpointError: on all ranks, where the files lack a parameter of the model below the head.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    absent = load_model(module, directory, strict=False)
    counted = (absent, len(list(module.parameters())))
    ranks = all_gather_object(counted, dist.group.WORLD)  # the head may be on another stage
    names = sorted({name for rank_names, _ in ranks for name in rank_names})
    inner = [name for name in names if prefix == "." or name.startswith(prefix)]
    if inner or all(len(rank_names) == count for rank_names, count in ranks):
        raise CheckpointError(
            f"{directory} lacks weights of its model",
            got=f"{len(inner or names)} are missing, the first of them {(inner or names)[0]}",
            cause="they would be random numbers",
            fix="check that config.json is the one these weights were made with",
        )
    if names and dist.get_rank() == 0:
        LOGGER.warning("%s lacks %s: new values were drawn for them", directory, ", ".join(names))


def without_memory(module: nn.Module) -> nn.Module:
    """Return the whole of a model of transformers on the meta device; a rank of a pipeline has a part. Others as is."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return module
    with torch.device("meta"):
        return type(module)(module.config)


def _is_run(directory: Path) -> bool:
    return directory.name.startswith("step-") or latest(directory) is not None


def check_no_pickle(checkpoint: Path) -> None:
    """Raise CheckpointError where a file, or all that a directory has, is a pickle, or there is nothing."""
    if checkpoint.is_dir():
        pickles = [path for path in sorted(checkpoint.iterdir()) if path.suffix in PICKLES]
        if not pickles or any(checkpoint.glob("*.safetensors")):
            return
        checkpoint = pickles[0]
    elif not checkpoint.exists():
        raise CheckpointError(f"there is no {checkpoint}", fix="check the path; all ranks must see it")
    elif _is_safetensors(checkpoint):
        return
    raise CheckpointError(
        f"{checkpoint} is a pickle, which can run code when it is read",
        got=checkpoint.suffix or "no safetensors",
        expected="safetensors",
        fix='convert a file that you trust, once: python -c "import torch, safetensors.torch as s; '
        "s.save_file({k: v.contiguous().clone() for k, v in torch.load('IN.bin', weights_only=True).items()}, "
        "'model.safetensors')\"",
    )


def _is_safetensors(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size


# -- optimizers --------------------------------------------------------------------------------------------------------


def save_optimizer(optimizer: BoostedOptimizer, checkpoint: Path) -> None:
    """Write an optimizer's state and master weights into a directory, for any ranks and plugins. Collective."""
    state: dict[str, Any] = dict(_tensors(optimizer))
    state[GROUPS] = [_options(group) for group in optimizer.param_groups]
    if optimizer.loss_scale is not None:
        state[SCALE] = optimizer.loss_scale.state_dict()
    _on_first(lambda: _check_directory(checkpoint))
    number = _on_all(lambda: 1 + max([int(path.name.split("-")[1]) for path in steps(checkpoint)], default=0))
    save(checkpoint, state, step=number, keep_last=1)


def _tensors(optimizer: BoostedOptimizer) -> dict[str, BoxedTensor]:
    """Return an optimizer's state and master weights, by the names of a run's checkpoint: views."""
    state = optimizer.weights.state()
    return {name: value for name, value in state.items() if isinstance(value, BoxedTensor)}


def load_optimizer(optimizer: BoostedOptimizer, checkpoint: Path) -> None:
    """Fill an optimizer, under any plugin, from what `save_optimizer` has written under any other. Collective.

    Raises:
        CheckpointError: it is a pickle, or of another model or optimizer.
    """
    if not checkpoint.is_dir():
        check_no_pickle(checkpoint)
        raise CheckpointError(f"{checkpoint} is no directory of save_optimizer")
    saved = contents(checkpoint)
    state = _tensors(optimizer)
    values = load(checkpoint, {name: value for name, value in state.items() if name in saved.tensors})
    _check_slots(checkpoint, state, saved.tensors)
    groups = values[GROUPS]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint} is of an optimizer with other groups",
            got=f"{len(groups)} groups",
            expected=f"{len(optimizer.param_groups)}",
            fix="make the optimizer as it was made then",
        )
    optimizer.weights.loaded(
        [_with_saved(*pair) for pair in zip(groups, optimizer.param_groups, strict=True)]
    )
    if optimizer.loss_scale is not None and SCALE in values:
        optimizer.loss_scale.load_state_dict(values[SCALE])


def _check_slots(checkpoint: Path, state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    missing = [name for name in state if name.startswith("optimizer.") and name not in tensors]
    if missing:
        raise CheckpointError(
            f"{checkpoint} is of another optimizer",
            got=f"no {missing[0]}, and {len(missing) - 1} more",
            fix="load into an optimizer of the kind that was saved",
        )


def _with_saved(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's options, those of this class that it does not have as they are."""
    options = {key: value for key, value in group.items() if key != "params"}
    return options | {key: _as(value, options[key]) for key, value in saved.items() if key in options}


def _as(value: Any, like: Any) -> Any:
    return tuple(value) if isinstance(like, tuple) and isinstance(value, list) else value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None), list, tuple)
    options = {key: value for key, value in group.items() if key != "params"}
    values = {
        key: value.item() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    return {key: value for key, value in values.items() if isinstance(value, plain)}


def _check_directory(checkpoint: Path) -> None:
    if checkpoint.exists() and not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} is a file", expected="a directory, or nothing", fix="another path"
        )


# -- schedules ---------------------------------------------------------------------------------------------------------


def save_schedule(schedule: Any, checkpoint: Path) -> None:
    """Write where a schedule of learning rates stands, on the first rank; all wait for it."""

    def write() -> None:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(schedule.state_dict(), checkpoint)

    _on_first(write)


def load_schedule(schedule: Any, checkpoint: Path) -> None:
    """Let a schedule of learning rates go on from where it stood; nothing in the file is run.

    Raises:
        CheckpointError: there is no such file, or it is of something else.
    """
    try:
        with torch.serialization.safe_globals([Counter]):
            state = torch.load(checkpoint, weights_only=True)
    except Exception as error:  # of the file system, of zip files, of what weights_only refuses
        cause = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{checkpoint} is no schedule of learning rates", cause=cause) from None
    schedule.load_state_dict(state)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _on_first(action: Any) -> None:
    """Do something on the first rank, and raise on all what it raises there."""
    _on_all(action)


def _on_all(action: Any) -> Any:
    """Return on all ranks what the first one's action returns, or raise what it raises. Collective."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, 0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
