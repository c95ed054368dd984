"""What keys of a DeepSpeed json are in cai's config, and the reasons for those that are nothing."""

from __future__ import annotations

from collections.abc import Mapping

BUCKETS = "gradients of a block are one bucket"
OVERLAP = "what travels does so beside the computation wherever it can"
ELSEWHERE = "`--log.trace`, `cai report` and `cai plan` show it"

SAME: Mapping[str, str] = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.microbatch_size",
    "gradient_clipping": "optimizer.clip",
    "seed": "train.seed",
    "zero_optimization.stage": "parallel.zero",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_num_steps": "lr_schedule.warmup_steps",
    "scheduler.params.total_num_steps": "lr_schedule.decay_steps",
    "tensor_parallel.autotp_size": "parallel.tensor.size",
    "tensorboard.enabled": "log.trackers",
    "wandb.enabled": "log.trackers",
    "wandb.project": "log.project",
}
"""Keys with a counterpart of the same meaning."""

WORKED_OUT: Mapping[str, str] = {
    "bf16.enabled": 'precision.compute = "bf16"',
    "fp16.enabled": 'precision.compute = "fp16", whose loss scale is dynamic',
    "gradient_accumulation_steps": "follows from train.global_batch and train.microbatch_size",
    "optimizer.type": "optimizer.kind",
    "optimizer.params.betas": "optimizer.beta1, optimizer.beta2",
    "scheduler.type": "lr_schedule: a line up, then half a cosine to lr_schedule.floor",
    "scheduler.params.warmup_max_lr": "optimizer.lr, the peak",
    "zero_optimization.offload_optimizer.device": "memory.residency",
    "zero_optimization.offload_param.device": "memory.residency",
    "zero_optimization.offload_optimizer.nvme_path": "memory.nvme",
    "zero_optimization.offload_param.nvme_path": "memory.nvme",
    "zero_optimization.zero_quantized_weights": 'parallel.wire_weights = "int8"',
    "zero_optimization.zero_quantized_gradients": 'parallel.wire_gradients = "int8"',
    "activation_checkpointing.partition_activations": 'memory.recompute = "full"',
    "activation_checkpointing.cpu_checkpointing": 'memory.activations = "host"',
}
"""Keys from which others follow."""

NOTHING: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.sub_group_size",
            "zero_optimization.allgather_partitions",
            "zero_optimization.reduce_scatter",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.round_robin_gradients",
        ),
        BUCKETS,
    ),
    "zero_optimization.overlap_comm": OVERLAP,
    "zero_optimization.offload_optimizer.pin_memory": "memory is pinned where copies cross",
    "zero_optimization.offload_param.pin_memory": "memory is pinned where copies cross",
    "zero_optimization.offload_optimizer.buffer_count": "copies of a disk are as many as its bandwidth takes",
    "zero_optimization.offload_param.buffer_count": "copies of a disk are as many as its bandwidth takes",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "exports are whole, in the dtype of computation",
    "zero_allow_untested_optimizer": "an optimizer is tried before it steps parts",
    "zero_force_ds_cpu_optimizer": "torch's fused step runs on the host",
    **dict.fromkeys(
        (
            "fp16.loss_scale",
            "fp16.initial_scale_power",
            "fp16.loss_scale_window",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "fp16.auto_cast",
        ),
        "the loss scale finds itself; `BoostConfig(scaling=...)` sets it in a loop of your own",
    ),
    "optimizer.params.adam_w_mode": "decay is apart from the gradient",
    "optimizer.params.torch_adam": "a kernel steps on GPUs",
    "scheduler.params.warmup_min_lr": "the warm-up begins near 0",
    "scheduler.params.warmup_type": "the warm-up is a line",
    "scheduler.params.last_batch_iteration": "a run knows its step",
    "activation_checkpointing.contiguous_memory_optimization": "inputs of blocks lie where they were made",
    "activation_checkpointing.number_checkpoints": "each block is one",
    "activation_checkpointing.synchronize_checkpoint_boundary": ELSEWHERE,
    "activation_checkpointing.profile": ELSEWHERE,
    "steps_per_print": "log.every, where the output is no terminal",
    "wall_clock_breakdown": ELSEWHERE,
    "dump_state": ELSEWHERE,
    "memory_breakdown": ELSEWHERE,
    "prescale_gradients": "gradients are averaged in the dtype of master weights",
    "gradient_predivide_factor": "gradients are averaged in the dtype of master weights",
    "communication_data_type": "gradients are summed in the dtype of master weights",
    "disable_allgather": OVERLAP,
    "sparse_gradients": "gradients of embeddings are dense",
    "tensorboard.output_path": "curves lie in the run's directory",
    "tensorboard.job_name": "curves lie in the run's directory",
    "wandb.group": "the tracker takes it from its own variables",
    "wandb.team": "the tracker takes it from its own variables",
}
"""Keys that change nothing here, each with the reason."""

SECTIONS: Mapping[str, str] = {
    "amp": "precision.compute",
    "aio": "reads and writes of a disk are direct, by threads",
    "autotuning": '`cai plan`, zero = "auto" and memory.recompute = "auto"',
    "comms_logger": ELSEWHERE,
    "compression_training": "`lora.base` and precision.linear have fewer bits",
    "curriculum_learning": "order the data",
    "data_efficiency": "order the data",
    "elasticity": "`cai run --max-restarts`; a run goes on with any number of ranks",
    "flops_profiler": ELSEWHERE,
    "csv_monitor": "metrics.jsonl is in the run's directory",
}
"""Whole sections without a counterpart key, each with what there is."""

OPTIMIZERS: Mapping[str, str] = {
    "adam": "adamw",
    "adamw": "adamw",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "muon": "muon",
}
"""Types of optimizers, in small letters -> `optimizer.kind`."""
