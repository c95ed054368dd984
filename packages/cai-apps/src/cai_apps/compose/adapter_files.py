"""Adapters of a model in the folders of peft: written from any layout, checked, and read into any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.compose.dora import MAGNITUDES, write_lengths
from cai_apps.compose.expert_adapters import file_key, file_shape, from_file, is_expert_adapter, to_file
from cai_apps.compose.lora import full_tensors, inside, is_adapter
from cai_apps.config.adapters import BASE_DIGEST, PREFIX, WEIGHTS, Adapter, read_adapter
from cai_mesh.checkpoint import NewDirectory, load_hf
from cai_mesh.errors import ConfigError
from cai_mesh.layout import BoxedTensor

if TYPE_CHECKING:
    from peft import LoraConfig

SHOWN = 4
"""Tensors in an error."""


def names_in_file(model: nn.Module) -> dict[str, list[str]]:
    """Return the names that a file has, after peft's prefix, for what a model with adapters learns, by its own names.

    What is tied has several; its own is the first of them.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            aliases.setdefault(param, []).append(name)
    return {names[0]: [key_of(model, name) for name in names] for names in aliases.values()}


def key_of(model: nn.Module, name: str) -> str:
    """Return what a file calls a parameter of a model with adapters, after peft's prefix."""
    if is_expert_adapter(name):
        return file_key(model, name)
    return (
        name.removesuffix(".default.weight") if name.endswith(MAGNITUDES) else name.replace(".default.", ".")
    )


def check_adapter(adapter: Adapter, model: nn.Module) -> None:
    """Check an adapter against the model, on any device, that its options make of a base.

    Raises:
        ConfigError: tensors are missing, of another shape, or of no layer of the model; or it has trained apart what
            the base ties.
    """
    shapes = {
        name: file_shape(name, param.shape) if is_expert_adapter(name) else tuple(param.shape)
        for name, param in model.named_parameters()
    }
    names = names_in_file(model)
    rows = []
    for name, aliases in names.items():
        present = [alias for alias in aliases if alias in adapter.shapes]
        if not present:
            rows.append(f"{aliases[0]}: this model {shapes[name]}, the adapter nothing")
        rows += [
            f"{alias}: this model {shapes[name]}, the adapter {adapter.shapes[alias]}"
            for alias in present
            if adapter.shapes[alias] != shapes[name]
        ]
    expected_names = {alias for aliases in names.values() for alias in aliases}
    unexpected_names = sorted(adapter.shapes.keys() - expected_names)
    rows += [f"{name}: this model nothing, the adapter {adapter.shapes[name]}" for name in unexpected_names]
    if rows:
        more = f"\n             and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        raise ConfigError(
            f"the adapter at {adapter.directory} is of another model",
            got="\n             ".join(rows[:SHOWN]) + more,
            cause=f"it was trained beside {adapter.base}" if adapter.base else "",
            fix="name the base that it was trained beside as model.name",
        )
    tied = [aliases for aliases in names.values() if len(aliases) > 1 and not adapter.keeps_ties]
    if tied:
        raise ConfigError(
            f"the adapter at {adapter.directory} has trained apart what its base ties",
            got=" and ".join(tied[0]),
            expected="ensure_weight_tying in its options: one tensor, as in the base",
            fix="merge it into a base without ties by peft, and begin a new adapter beside that",
        )


def check_trained_beside(adapter: Adapter, name: str, digest: str | None) -> str:
    """Compare the base of an adapter with a run's; return a line that says where they have other names, or nothing.

    Args:
        adapter: the adapter.
        name: the name of the run's base.
        digest: the digest of its weights; None: it is not known.

    Raises:
        ConfigError: the weights are not those that the adapter was trained beside.
    """
    if adapter.base_digest is not None and digest is not None and adapter.base_digest != digest:
        raise ConfigError(
            f"the adapter at {adapter.directory} was trained beside other weights",
            got=f"those of {name}",
            expected=f"those of {adapter.base or 'its base'}, as they were",
            cause="what it adds was learned for the weights that it was added to",
            fix="name that base as model.name, or bring back its files",
        )
    if adapter.base and adapter.base_digest is None and adapter.base != name:
        return f"the adapter names {adapter.base} as its base, which is {name} here; its layers have the same shapes"
    return ""


def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Fill what a folder that `check_adapter` has passed holds of a model with adapters, on any layout. Collective.

    The weights beside which they learn are there already: learned lengths of rows are kept less those of these.
    """
    directory, stored = Path(directory).expanduser(), read_adapter(directory).shapes

    def key(name: str) -> str | None:
        other = is_expert_adapter(name) or name.endswith(MAGNITUDES)
        present = not other and key_of(model, name) in stored
        return f"{PREFIX}{key_of(model, name)}" if present else None

    load_hf(model, directory, file=WEIGHTS, names=key)
    _load_others(model, directory)


def _load_others(model: nn.Module, directory: Path) -> None:
    """Fill what a file has in another form: matrices of experts by their order, lengths of rows without a base."""
    from safetensors import safe_open

    with safe_open(directory / WEIGHTS, "pt") as file:
        write_lengths(model, lambda name: file.get_tensor(PREFIX + key_of(model, name)))
        for name, param in model.named_parameters():
            if is_expert_adapter(name):
                boxed = BoxedTensor.from_param(param)
                value = from_file(name, file.get_tensor(PREFIX + key_of(model, name)), boxed.global_shape[0])
                for box, view in boxed.pieces:
                    view.copy_(value[box.slices()])


def nothing_to_merge(run: Path) -> ConfigError:
    """Return the error of a run without adapters whose adapters are to be merged."""
    return ConfigError(
        "there is nothing to merge",
        got=f"{run}: lora.rank = 0, all weights are trained",
        fix="leave --merge out",
    )


def save_adapter(
    new: NewDirectory,
    weights: Mapping[str, BoxedTensor],
    model: nn.Module,
    options: LoraConfig,
    digest: str | None,
    task_type: str | None = "CAUSAL_LM",
    learned: Sequence[str] = (),
) -> None:
    """Write the adapters of a model as `PeftModel.from_pretrained` of peft reads them. Collective.

    Args:
        new: the directory of the files.
        weights: the trained weights by name; a rank may hold parts of some of them.
        model: the whole model with its adapters, without memory.
        options: their options.
        digest: the digest of the base's weights.
        task_type: peft's name of the kind of model; None: it has none.
        learned: names of modules that are trained whole, where they have others inside.
    """
    from safetensors.torch import save_file

    names = names_in_file(model)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    modules = {alias.rpartition(".")[0] for name in names if not is_adapter(name) for alias in names[name]}
    modules = {next((outer for outer in learned if inside(name, (outer,))), name) for name in modules}
    options.modules_to_save = sorted(modules) or None
    options.ensure_weight_tying = any(len(aliases) > 1 for aliases in names.values())
    options.fan_in_fan_out = any(getattr(layer, "fan_in_fan_out", False) for layer in layers)
    options.task_type, options.inference_mode = task_type, True
    tensors: dict[str, Tensor] = {}
    for name, value in full_tensors(weights, names.__contains__):
        if dist.get_rank() == 0:
            arranged = to_file(name, value) if is_expert_adapter(name) else value
            tensors |= {f"{PREFIX}{alias}": arranged.float().clone() for alias in names[name]}
    metadata = {"format": "pt"} | ({} if digest is None else {BASE_DIGEST: digest})

    def write() -> None:
        options.save_pretrained(new.temporary)
        save_file(tensors, new.temporary / WEIGHTS, metadata=metadata)

    new.write(write, first=True)
