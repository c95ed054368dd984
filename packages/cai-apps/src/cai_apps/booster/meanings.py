"""What options that several plugins share mean in cai's sections."""

from __future__ import annotations

from typing import Any, Literal

from cai_apps.booster.config import BoostConfig, OnDevice, Scaling
from cai_apps.config.optimizer import Optimizer
from cai_apps.config.sections import Context, Memory, Parallel, Pipeline, Precision, Tensor
from cai_mesh.errors import ConfigError, did_you_mean

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of torch's dtypes -> those of a config."""
SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved", "zbv": "zb-v"}
"""`pp_style` -> `pipeline.schedule`."""

KERNELS = "kernels are chosen by the device (train.kernels, train.compile): on GPUs they run, on a CPU torch's own do"
BUCKETS = "gradients of a block are one bucket, which is reduced as soon as the block's backward is over"
OVERLAP = "what travels does so beside the computation wherever it can"
STREAMS = "memory is pinned where copies cross"
ORDER = "the order of ranks does not change what is computed"
SCALE = "the scale backs off at every overflow, without bounds, and grows after growth_interval good steps"
SHARED = {
    "min_scale": SCALE,
    "hysteresis": SCALE,
    "max_scale": SCALE,
}
"""Options of the loss scale that several plugins have, and that change nothing."""


WRAPPING = {
    "broadcast_buffers": "buffers are the same on all ranks from boost on, and each rank keeps its own statistics",
    "find_unused_parameters": "what a rank does not use is found anyway",
    "check_reduction": "ranks are compared in what they begin anyway",
    "gradient_as_bucket_view": "gradients lie in their bucket anyway",
    "static_graph": "nothing is assumed of the graph",
}
"""Options of DistributedDataParallel, which change nothing."""


def of_choice(name: str, value: Any, choices: Any) -> Any:
    """Return a value that is one of some choices.

    Raises:
        ConfigError: it is none.
    """
    if value not in choices:
        raise ConfigError(
            f"unknown {name}",
            got=repr(value),
            expected=", ".join(map(repr, choices)),
            fix=did_you_mean(str(value), map(str, choices)),
        )
    return value


def dtype_name(name: str, dtype: Any) -> Dtype:
    """Return a config's name of one of torch's dtypes.

    Args:
        name: the name of the option, for messages.
        dtype: the dtype.

    Raises:
        ConfigError: it is no dtype that models are trained in.
    """
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise ConfigError(f"unknown {name}", got=dtype, expected=", ".join(f"torch.{key}" for key in DTYPES))
    return DTYPES[text]


def scaling_of(plugin: Any) -> Scaling:
    """Return the loss scale that a plugin's options ask for."""
    return Scaling(
        initial=float(plugin.initial_scale),
        growth=float(plugin.growth_factor),
        backoff=float(plugin.backoff_factor),
        interval=int(plugin.growth_interval),
    )


def clipping(max_norm: float) -> Optimizer:
    """Return the section of an optimizer that clips to a norm; 0: it does not."""
    return Optimizer(clip=float(max_norm) if max_norm else float("inf"))


def check_norm(plugin: Any) -> None:
    """Raise ConfigError for another norm than that of squares."""
    if float(plugin.norm_type) != 2.0:
        raise ConfigError(
            f"{type(plugin).__name__} clips by the square root of the sum of squares",
            got=f"norm_type = {plugin.norm_type}",
            expected="2.0",
            fix="leave max_norm out, and call torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type) "
            "before optimizer.step()",
        )


def check_policy(plugin: Any) -> None:
    """Raise ConfigError for a policy of layers, which is another library's classes."""
    if plugin.custom_policy is not None:
        raise ConfigError(
            f"{type(plugin).__name__} takes no custom_policy",
            got=type(plugin.custom_policy).__name__,
            cause="it would replace layers by classes of another library",
            fix="leave it out: models of transformers have a plan, or one is found from their structure; of your own "
            "model call cai_tensor_parallel.parallelize(model, mesh, Plan({...})) before boost",
        )


def sequence_of(plugin: Any) -> tuple[bool, Context]:
    """Return whether tensor ranks cut sequences, and the ranks that have rows together.

    Raises:
        ConfigError: the mode is unknown, or sizes do not go with it.
    """
    size = plugin.sp_size or 1
    name = type(plugin).__name__
    if not plugin.enable_sequence_parallelism:
        if size != 1:
            raise ConfigError(
                f"{name} has ranks for sequences, and sequences stay whole",
                got=f"sp_size = {size}, enable_sequence_parallelism = False",
                fix="set enable_sequence_parallelism=True, or leave sp_size out",
            )
        return False, Context()
    modes = ("split_gather", "ring", "all_to_all", "ring_attn")
    mode = of_choice("sequence_parallelism_mode", plugin.sequence_parallelism_mode or "all_to_all", modes)
    if mode in ("split_gather", "ring"):
        if plugin.tp_size < 2:
            raise ConfigError(
                f"sequence_parallelism_mode {mode!r} cuts sequences over the tensor-parallel ranks",
                got=f"tp_size = {plugin.tp_size}",
                fix="raise tp_size, or take 'all_to_all' with sp_size",
            )
        return True, Context()
    return False, Context(size=size, mode="ulysses" if mode == "all_to_all" else "ring")


def pipeline_of(plugin: Any) -> Pipeline:
    """Return the pipeline of a hybrid plugin."""
    style = of_choice("pp_style", plugin.pp_style, SCHEDULES)
    layers = plugin.num_layers_per_stage
    return Pipeline(
        size=plugin.pp_size,
        chunks=plugin.num_model_chunks,
        schedule=SCHEDULES[style],  # type: ignore[arg-type]
        balance=() if layers is None else tuple(layers),
        wire="fp8" if plugin.fp8_communication else "full",
        microbatches=plugin.num_microbatches,
    )


def hybrid(plugin: Any, *, experts: Any = None) -> BoostConfig:
    """Return the config of a plugin with degrees of several kinds."""
    sequence, context = sequence_of(plugin)
    zero, memory, on_device = int(plugin.zero_stage), Memory(), OnDevice()
    if plugin.cpu_offload:
        zero, memory, on_device = 3, Memory(residency="host"), OnDevice(weights=1.0)
    wire = "fp8" if plugin.fp8_communication and zero else "full"
    parallel = Parallel(
        shard=-1,
        zero=zero,  # type: ignore[arg-type]
        wire_gradients=wire,
        tensor=Tensor(size=plugin.tp_size, sequence=sequence),
        context=context,
        pipeline=pipeline_of(plugin),
        **({} if experts is None else {"experts": experts}),
    )
    share, layers = recompute_of(plugin.gradient_checkpoint_config)
    return BoostConfig(
        parallel=parallel,
        memory=memory,
        on_device=on_device,
        precision=Precision(
            compute=of_choice("precision", plugin.precision, ("fp16", "bf16", "fp32")),
            linear="fp8" if plugin.use_fp8 else "compute",
        ),
        optimizer=clipping(plugin.max_norm),
        scaling=scaling_of(plugin),
        reduce="auto"
        if plugin.communication_dtype is None
        else dtype_name("communication_dtype", plugin.communication_dtype),
        recompute_share=share,
        recompute_layers=layers,
    )


def recompute_of(config: Any) -> tuple[float, tuple[int, ...]]:
    """Return which part of the layers runs again in backward, and how many of each stage."""
    if config is None:
        return 1.0, ()
    layers = tuple(getattr(config, "num_ckpt_layers_per_stage", None) or ())
    ratio = float(config.gradient_checkpointing_ratio)
    return (1.0 if layers else ratio), layers
