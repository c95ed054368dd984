"""A DeepSpeed json becomes sections that cai's own reader takes; what is not here is named."""

from __future__ import annotations

import json
import tomllib

import pytest

from cai_apps.compat.deepspeed import converted
from cai_apps.compat.deepspeed.__main__ import main
from cai_apps.compat.deepspeed.rows import NOTHING, SAME, WORKED_OUT
from cai_apps.config.file import from_table, known_keys
from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError

# as the documentation of transformers and DeepSpeed shows them, with "auto" where the Trainer fills in
STAGE_3 = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-5,
            "warmup_num_steps": 500,
            "total_num_steps": 9000,
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
EXPECTED = {
    "train": {"global_batch": 64, "microbatch_size": 2},
    "optimizer": {
        "kind": "adamw",
        "lr": 3e-5,
        "beta1": 0.8,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 3e-7,
        "clip": 1.0,
    },
    "lr_schedule": {"warmup_steps": 500, "decay_steps": 9000},
    "parallel": {"zero": 3, "shard": -1},
    "memory": {"residency": "host"},
    "precision": {"compute": "fp16"},
}


def test_a_config_of_stage_3_with_offloading():
    result = converted(STAGE_3)
    assert result.tables == EXPECTED
    assert tomllib.loads(result.toml()) == EXPECTED
    from_table(RunConfig, result.tables, origin="the result")
    assert any("WarmupDecayLR" in note for note in result.notes)
    assert any("overlap_comm: no effect" in note for note in result.notes)


def test_smaller_configs():
    assert converted({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}).tables == {
        "parallel": {"zero": 2, "shard": -1, "wire_gradients": "int8"}
    }
    disk = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    result = converted({"zero_optimization": disk, "activation_checkpointing": {"cpu_checkpointing": True}})
    assert result.tables["parallel"]["zero"] == 3 and "zero_optimization.stage: 3 here" in result.toml()
    assert result.tables["memory"] == {
        "residency": "nvme",
        "nvme": "/disk",
        "recompute": "full",
        "activations": "host",
    }


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization.stage'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "no optimizer"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "leave one"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "cpu, nvme or none"),
    ],
)
def test_what_is_not_here_is_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        converted(table)


def test_keys_of_cai_are_keys_of_cai():
    keys = known_keys(RunConfig)
    assert set(SAME.values()) <= set(keys)
    assert set(SAME).isdisjoint(NOTHING) and set(WORKED_OUT).isdisjoint({*SAME, *NOTHING})


def test_the_command(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(STAGE_3))
    assert main([str(file), "-o", str(tmp_path / "mine.toml")]) == 0
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == (tmp_path / "mine.toml").read_text()
    file.write_text("{")
    assert main([str(file)]) == 1 and "is no config of DeepSpeed" in capsys.readouterr().err
