"""What every option of every plugin of ColossalAI is here: rows of a table, which the guide prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cai_apps.booster import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from cai_apps.compat.colossalai.signatures import REQUIRED, SIGNATURES

PLUGINS: Mapping[str, type[Plugin]] = {
    kind.__name__: kind
    for kind in (
        TorchDDPPlugin,
        LowLevelZeroPlugin,
        GeminiPlugin,
        TorchFSDPPlugin,
        HybridParallelPlugin,
        MoeHybridParallelPlugin,
    )
}


class Meaning(NamedTuple):
    """What an option is here.

    Args:
        text: the section and key of cai's config, or the reason why it changes nothing or is refused.
        differs: whether it means something else than in ColossalAI, though it has an effect.
    """

    text: str
    differs: bool = False


AWAY = '`memory.residency = "host"` with ZeRO-3: state in host memory goes with sharded parameters'
MEANINGS: Mapping[str, Meaning] = {
    "backoff_factor": Meaning("`scaling.backoff`"),
    "cast_inputs": Meaning("whether floating-point inputs become `precision.compute`"),
    "communication_dtype": Meaning("`reduce`, the dtype in which gradients are summed"),
    "cpu_offload": Meaning(AWAY, differs=True),
    "custom_policy": Meaning("None; a policy is refused: plans are found from the model"),
    "enable_sequence_parallelism": Meaning(
        "switches on `sequence_parallelism_mode`; of Gemini `tensor.sequence`"
    ),
    "ep_size": Meaning("`parallel.experts.size`"),
    "extra_dp_size": Meaning("`parallel.replicate`"),
    "force_outputs_fp32": Meaning('`outputs = "fp32"`'),
    "fp8_communication": Meaning(
        '`wire_weights`, `wire_gradients` and `pipeline.wire` = "fp8"', differs=True
    ),
    "gradient_checkpoint_config": Meaning(
        "which layers run again, where the model's gradient checkpointing is on"
    ),
    "growth_factor": Meaning("`scaling.growth`"),
    "growth_interval": Meaning("`scaling.interval`"),
    "ignored_modules": Meaning("None; others are refused: freeze them"),
    "initial_scale": Meaning("`scaling.initial`"),
    "master_weights": Meaning("`masters`"),
    "max_norm": Meaning("`optimizer.clip`; 0: none"),
    "microbatch_size": Meaning("samples of a microbatch; `num_microbatches` counts first"),
    "mixed_precision": Meaning("`precision.compute` (`param_dtype`) and `reduce` (`reduce_dtype`)"),
    "norm_type": Meaning("2.0; others are refused: clip by torch's own before step()"),
    "num_layers_per_stage": Meaning("`parallel.pipeline.balance`"),
    "num_microbatches": Meaning("`parallel.pipeline.microbatches`"),
    "num_model_chunks": Meaning("`parallel.pipeline.chunks`"),
    "offload_optim_frac": Meaning('`memory.residency = "host"`, `on_device.state` = 1 - it'),
    "offload_param_frac": Meaning('`memory.residency = "host"`, `on_device.weights` = 1 - it'),
    "param_init_fn": Meaning("None; others are refused: boost keeps the values that the model has"),
    "placement_policy": Meaning(
        '`memory.residency`: static by the fractions, auto, cuda "device", cpu "host"'
    ),
    "pp_size": Meaning("`parallel.pipeline.size`"),
    "pp_style": Meaning('`parallel.pipeline.schedule`: 1f1b, interleaved, zbv "zb-v"'),
    "precision": Meaning("`precision.compute`, with master weights in fp32"),
    "process_group": Meaning("None; others are refused"),
    "sequence_parallelism_mode": Meaning(
        'split_gather and ring: `tensor.sequence`; all_to_all: `context.mode = "ulysses"`; ring_attn: "ring"'
    ),
    "shard_param_frac": Meaning("0: ZeRO-2, else ZeRO-3 of all parameters", differs=True),
    "sharding_strategy": Meaning(
        "ZeRO-3; SHARD_GRAD_OP: 2, NO_SHARD: 0, HYBRID_SHARD: `replicate` over hosts"
    ),
    "sp_size": Meaning("`parallel.context.size` (all_to_all, ring_attn)"),
    "stage": Meaning("`parallel.zero`; 3 too"),
    "tp_size": Meaning("`parallel.tensor.size`"),
    "use_fp8": Meaning('`precision.linear = "fp8"`'),
    "zero_stage": Meaning("`parallel.zero`; 3 too, and with pipelines"),
}
"""Options that have an effect."""

REFUSED = {
    "custom_policy": "plans are found from the model",
    "ignored_modules": "freeze them",
    "param_init_fn": "boost keeps the values that the model has",
    "process_group": "ConfigPlugin says which ranks share parameters",
}
"""Options that must be None, and the reason."""


def meaning(plugin: str, option: str) -> Meaning:
    """Return what an option of a plugin is here.

    Args:
        plugin: the plugin's name.
        option: the option's name.
    """
    reason = PLUGINS[plugin].no_effect.get(option)
    return MEANINGS[option] if reason is None else Meaning(f"no effect: {reason}")


def table(plugin: str) -> str:
    """Return the rows of a plugin's options as a table of Markdown."""
    rows = [f"| `{plugin}` | default | here |", "|---|---|---|"]
    for option, default in SIGNATURES[plugin].items():
        text = "" if default is REQUIRED else f"`{default!r}`"
        rows.append(f"| `{option}` | {text} | {meaning(plugin, option).text} |")
    return "\n".join(rows)
