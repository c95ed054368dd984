"""Folders of adapters as peft writes them, read without torch.

adapter_config.json          rank, alpha, layers, and which of peft's methods it is
adapter_model.safetensors    base_model.model.LAYER.lora_A.weight, ...lora_B.weight, ...lora_magnitude_vector (DoRA);
                             MODULE.weight of what was trained whole
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cai_mesh.errors import ConfigError
from cai_mesh.files import check_header, header_metadata

OPTIONS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of every name in the file of weights."""
A, B, MAGNITUDES = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
BASE_DIGEST = "base_digest"
"""Key of the digest of the base's weights, in the head of a file of weights that was written here."""

PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values that change nothing of what a finished adapter means. Other ways to begin have changed the base, too."""
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys that are read here, or that say nothing of what an adapter adds. `layers_to_transform` and the like choose
layers, which the names of the tensors say as well."""
WRAPPED, EXPERTS = ".base_layer", "experts"
"""What peft writes for a layer inside a wrapper, and the usual end of the name of a layer of experts."""
CHOOSING = ("exclude_modules", "layers_pattern", "layers_to_transform")


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder.

    Args:
        directory: the folder.
        rank: the rank of all its adapters.
        alpha: their alpha.
        rank_stabilized: whether alpha is divided by the root of the rank.
        dora: whether rows of its layers have lengths of their own.
        targets: its layers, by names or ends of them.
        modules: names of modules that were trained whole.
        keeps_ties: whether what the base ties is one tensor here too.
        shapes: shapes of its tensors by the names that the base has for their layers, as in "LAYER.lora_A.weight".
        base: the name of its base; empty: it does not say.
        base_digest: the digest of its base's weights; None: another program has written it.
    """

    directory: Path
    rank: int
    alpha: int
    rank_stabilized: bool
    dora: bool
    targets: tuple[str, ...]
    modules: tuple[str, ...]
    keeps_ties: bool
    shapes: dict[str, tuple[int, ...]]
    base: str
    base_digest: str | None


def is_adapter_folder(directory: Path) -> bool:
    """Return whether a directory holds an adapter and no model."""
    return (directory / OPTIONS).is_file() and not (directory / "config.json").is_file()


def read_adapter(place: str | Path) -> Adapter:
    """Return the adapter of a folder.

    Raises:
        ConfigError: there is none, or it is none that can be gone on with; the option of peft is named.
    """
    directory = Path(place).expanduser()
    table = _table(directory)
    _check_method(directory, table)
    header = check_header(directory / WEIGHTS, error=ConfigError)
    shapes = {_stripped(directory, name): tuple(entry["shape"]) for name, entry in header.items()}
    layers = tuple(sorted(name.removesuffix(A) for name in shapes if name.endswith(A)))
    parts_of_layers = (A, B, MAGNITUDES) if table.get("use_dora") else (A, B)
    modules = {name for name in shapes if not name.endswith(parts_of_layers)}
    if parts := sorted(name for name in modules if ".lora_" in name):
        raise _unsupported(
            directory, f"the tensor {parts[0]}", "adapters of another kind than LoRA's A and B"
        )
    if modules and not table.get("modules_to_save"):
        raise _unsupported(
            directory, f"the tensor {min(modules)}", "weights of the base that modules_to_save does not name"
        )
    metadata = header_metadata(directory / WEIGHTS)
    return Adapter(
        directory,
        _whole_number(directory, table, "r"),
        _whole_number(directory, table, "lora_alpha"),
        bool(table.get("use_rslora")),
        bool(table.get("use_dora")),
        _targets(table, layers),
        tuple(sorted({name.rpartition(".")[0] for name in modules})),
        bool(table.get("ensure_weight_tying")),
        shapes,
        str(table.get("base_model_name_or_path") or ""),
        metadata.get(BASE_DIGEST),
    )


def _targets(table: dict[str, Any], layers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ends of names that an adapter's options list, of layers that it has; else its layers' names.

    Beside them are the ends of names of stacked parameters (`target_parameters`), whose tensors bear the name of the
    layer of experts, each but the last with as many `.base_layer` as stand outside of it.
    """
    named, suffixes = table.get("target_modules") or [], table.get("target_parameters") or []
    parameters = {suffix if "." in suffix else f"{EXPERTS}.{suffix}" for suffix in suffixes}
    parents = {suffix.rpartition(".")[0] for suffix in parameters}
    plain = [
        layer
        for layer in layers
        if not any(_ends_with(layer.replace(WRAPPED, ""), suffix) for suffix in parents)
    ]
    if not isinstance(named, list) or any(table.get(key) for key in CHOOSING):
        return tuple(sorted(parameters | set(plain)))
    of_layers = {suffix for suffix in map(str, named) if any(_ends_with(layer, suffix) for layer in plain)}
    return tuple(sorted(parameters | of_layers))


def _ends_with(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _table(directory: Path) -> dict[str, Any]:
    file = directory / OPTIONS
    if not file.is_file() or not (directory / WEIGHTS).is_file():
        pickled = (directory / WEIGHTS.replace(".safetensors", ".bin")).is_file()
        raise ConfigError(
            f"no adapter at {directory}",
            expected=f"a folder with {OPTIONS} and {WEIGHTS}, as save_pretrained of peft writes it",
            cause="adapter_model.bin is a pickle, which can run code when it is read" if pickled else "",
            fix="load it with peft, if you trust it, and save it again" if pickled else "",
        )
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged", cause=str(error)) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is damaged", expected="a table of options")
    return table


def _check_method(directory: Path, table: dict[str, Any]) -> None:
    """Raise ConfigError for another method of peft, or an option by which the adapter means something else."""
    if table.get("peft_type") != "LORA":
        raise _unsupported(directory, f"peft_type = {table.get('peft_type')!r}", "another method of peft")
    parameters = table.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(end, str) for end in parameters):
        raise _unsupported(directory, f"target_parameters = {parameters!r}"[:100], "no list of names")
    for key, value in table.items():
        allowed = PLAIN.get(key, (value,) if key in HARMLESS else ())
        if value and value not in allowed:
            raise _unsupported(
                directory, f"{key} = {json.dumps(value)[:100]}", "it changes what an adapter adds, or to what"
            )


def _unsupported(directory: Path, got: str, cause: str) -> ConfigError:
    return ConfigError(
        f"the adapter at {directory} cannot be gone on with",
        got=got,
        expected="LoRA with one rank and one alpha for all layers",
        cause=cause,
        fix="merge it into its base by peft (merge_and_unload), and begin a new adapter beside that",
    )


def _stripped(directory: Path, name: str) -> str:
    if not name.startswith(PREFIX):
        raise ConfigError(
            f"{directory / WEIGHTS} is no file of peft's",
            got=repr(name),
            expected=f"names that begin {PREFIX}",
        )
    return name.removeprefix(PREFIX)


def _whole_number(directory: Path, table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if number < 1 or not float(number).is_integer():
        raise ConfigError(
            f"{directory / OPTIONS} has a value that is not supported",
            got=f"{key} = {value!r}",
            expected="a whole number from 1 on",
        )
    return int(number)
