"""Adapters beside experts: losses, gradients and files are those of peft's `target_parameters` in a plain loop."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import (
    VOCAB,
    Case,
    adamw,
    batch,
    full,
    model_config,
    parameters_of,
    rate,
    run_config,
    train_steps,
)
from safetensors.torch import load_file
from torch import nn

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.generate import Place, open_model
from cai_apps.applications.language.model import on_meta
from cai_apps.applications.language.task import export_adapter, export_hf, workload
from cai_apps.compose.adapter_files import load_adapter
from cai_apps.compose.apply import apply
from cai_apps.compose.expert_adapters import file_key, from_file, is_expert_adapter
from cai_apps.compose.lora import without_adapters
from cai_apps.config.adapters import read_adapter
from cai_apps.data.tokenizer import train_tokenizer
from cai_mesh.errors import ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

peft = pytest.importorskip("peft")

STEPS = 3
LAYERS = ("q_proj", "v_proj")
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LORA = LoRA(rank=3, alpha=8, targets=(*LAYERS, *BOTH))
CHOICES = {
    "qwen3_moe": LORA,
    "deepseek_v3": replace(LORA, targets=("kv_b_proj", *BOTH), rank_stabilized=True),
    "gpt_oss": replace(LORA, targets=(*LAYERS, *BOTH)),
    "experts alone": replace(LORA, targets=("experts.down_proj",)),
}
"""Types of models, gpt-oss with biases and matrices held the other way round, and options of their adapters."""
LAYOUTS = {
    "one": Case(),
    "one-recompute": Case(recompute="full"),
    "data2-zero3": Case(data=2, zero=3),
    "data2-experts2": Case(data=2, experts=2),
    "data2-experts2-zero3": Case(data=2, experts=2, zero=3, recompute="selective"),
    "pipeline2": Case(pipeline=2, zero=2),
    "one-compiled": Case(compile="on"),
    "one-kernels": Case(kernels="on"),
    "data2-experts2-kernels": Case(data=2, experts=2, kernels="on"),
}


def model_of(kind: str):
    from transformers import AutoConfig

    if kind != "gpt_oss":
        return model_config("qwen3_moe" if kind == "experts alone" else kind)
    return AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager",
    )  # fmt: skip


def config_of(kind: str, layout: str):
    return replace(run_config(LAYOUTS[layout], "fp64", STEPS), lora=CHOICES[kind])


def trained(kind: str, layout: str, directory: str | None = None):
    """First weights, losses, first gradients and last weights; exports are written."""
    config = config_of(kind, layout)
    session = apply(config, workload(config, model_of(kind)), device=torch.device("cpu"))
    first = full(parameters_of(session))
    losses, gradients = train_steps(session, LAYOUTS[layout], 0, STEPS)
    if directory is not None:
        _export(session, Path(directory))
    return first, losses, full(gradients), full(parameters_of(session))


def _export(session, directory: Path) -> None:
    if dist.get_rank() == 0:
        train_tokenizer(["a text"], 300).save_pretrained(directory / "tokenizer")
    dist.barrier()
    export_hf(session, directory / "export", directory / "tokenizer")
    weights, model = session.trained_weights(), session.model.config
    export_adapter(weights, session.config, model, directory / "adapter", directory / "tokenizer", None)


class Runs:
    """Runs of layouts and what they export, each once for all tests."""

    def __init__(self, home: Path):
        self._home = home

    @functools.cache  # noqa: B019 (one object a module)
    def of(self, kind: str, layout: str):
        self.exported(kind, layout).mkdir(parents=True)
        arguments = (kind, layout, str(self.exported(kind, layout)))
        return run_ranks(LAYOUTS[layout].world, trained, *arguments, timeout=400)[0]

    def exported(self, kind: str, layout: str) -> Path:
        return self._home / kind / layout

    @functools.cache  # noqa: B019
    def plain(self, kind: str):
        return plain_loop(kind, self.of(kind, "one")[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def peft_model(kind: str):
    from transformers import AutoModelForCausalLM

    lora = CHOICES[kind]
    base = AutoModelForCausalLM.from_config(model_of(kind)).double()
    parameters = [target for target in lora.targets if target.endswith(("up_proj", "down_proj"))]
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        target_modules=[target for target in lora.targets if target not in parameters],
        target_parameters=parameters,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, options).double()


def names_here(kind: str) -> dict[str, str]:
    """What peft calls the parameters of a session, by the session's names."""
    model, names = on_meta(config_of(kind, "one"), model_of(kind)), {}
    for name, _ in model.named_parameters():
        if is_expert_adapter(name):
            names[name] = file_key(model, name).replace(".weight", ".default.weight")
        elif ".experts." in name:
            layer, _, matrix = name.rpartition(".")
            adapted = model.get_submodule(layer)._modules.get("lora_A")
            depth = 0 if adapted is None else len(adapted._parameters)
            names[name] = f"{layer}{'.base_layer' * depth}.{matrix}"
        else:
            names[name] = name
    return names


def here(name: str, value: torch.Tensor, experts: int = 4) -> torch.Tensor:
    return from_file(name, value, experts) if is_expert_adapter(name) else value


def plain_loop(kind: str, first: dict[str, torch.Tensor]):
    """Losses, first gradients and last weights of the loop over peft's model, from a session's first weights."""
    model, names = peft_model(kind), names_here(kind)
    params = dict(model.named_parameters())
    learned = {}
    for name, value in first.items():
        param = params.pop(f"base_model.model.{names[name]}")
        here(name, param.data).copy_(value)
        if param.requires_grad:
            learned[name] = param
    assert not params, "parameters of peft's model that ours has not"
    optimizer, losses, gradients = adamw(model), [], {}
    for step in range(STEPS):
        ids, labels = batch(step)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        loss.backward()
        gradients = gradients or {name: here(name, p.grad.clone()) for name, p in learned.items()}
        nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: here(name, p.detach().clone()) for name, p in learned.items()}, model


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("qwen3_moe", layout) for layout in LAYOUTS), *((kind, "one") for kind in CHOICES if kind != "qwen3_moe"),
     ("gpt_oss", "data2-experts2"), ("experts alone", "data2-experts2-zero3")],
)  # fmt: skip
def test_it_is_the_loop_over_peft(kind, layout, runs):
    losses, gradients, last, _ = runs.plain(kind)
    first, got_losses, got_gradients, got_last = runs.of(kind, layout)
    rounds = LAYOUTS[layout].kernels == "on" or LAYOUTS[layout].compile == "on"  # norms compute in float32
    assert got_losses == pytest.approx(losses, rel=1e-6 if rounds else 1e-9)
    assert got_gradients.keys() == gradients.keys()
    assert any(is_expert_adapter(name) and value.abs().max() > 0 for name, value in gradients.items())
    assert_same_as_one_device(got_gradients, gradients, tolerance=1e-5 if rounds else 1e-8)
    if not rounds:  # AdamW divides by the root of small squares, and a last bit of float32 grows
        assert_same_as_one_device({name: got_last[name] for name in last}, last, tolerance=1e-7)
    assert all(torch.equal(value, first[name]) for name, value in got_last.items() if name not in last)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3_moe", "data2-experts2-zero3"), ("gpt_oss", "one")])
def test_peft_reads_what_is_exported(kind, layout, runs):
    from transformers import AutoModelForCausalLM

    runs.of(kind, layout)
    folder = runs.exported(kind, layout)
    trained_model = runs.plain(kind)[-1].eval()
    config = model_of(kind)
    base = AutoModelForCausalLM.from_config(config).double()
    with trained_model.disable_adapter(), torch.no_grad():
        expected_base = trained_model(input_ids=batch(0)[0]).logits
    params = dict(trained_model.named_parameters())
    names = names_here(kind)
    for name, param in base.named_parameters():
        key = next(mine for mine in names if mine.replace(".base_layer.", ".") == name)
        param.data.copy_(params[f"base_model.model.{names[key]}"])
    with torch.no_grad():
        assert torch.equal(base(input_ids=batch(0)[0]).logits, expected_base)
    read = peft.PeftModel.from_pretrained(base, folder / "adapter").double().eval()
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    merged = AutoModelForCausalLM.from_pretrained(folder / "export", **options).eval()
    with torch.no_grad():
        expected = trained_model(input_ids=batch(0)[0]).logits
        for model in (read, merged):  # files of adapters are in float32
            torch.testing.assert_close(model(input_ids=batch(0)[0]).logits, expected, rtol=1e-5, atol=1e-6)


def test_what_peft_writes_is_read(runs, tmp_path):
    model = runs.plain("qwen3_moe")[-1]
    model.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path)
    assert set(adapter.targets) == set(LORA.targets) and adapter.rank == LORA.rank
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    options["layers_to_transform"] = [0, 1, 2, 3]  # then layers are those of the tensors
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    layers = {f"model.layers.{index}.self_attn.{end}" for index in range(4) for end in LAYERS}
    assert set(read_adapter(tmp_path).targets) == {*layers, *BOTH}
    config = config_of("qwen3_moe", "one")
    ours = on_meta(config, model_of("qwen3_moe")).to_empty(device="cpu").double()
    load_adapter(ours, tmp_path)
    last = runs.plain("qwen3_moe")[2]
    for name, param in ours.named_parameters():
        if name in last:
            torch.testing.assert_close(param.data, last[name], rtol=1e-6, atol=1e-7)


def test_an_adapter_of_some_layers_answers_as_in_peft(tmp_path):
    """The options of OpenAI's guide to fine-tuning gpt-oss: all linear layers, and the experts of chosen layers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(model_of("gpt_oss"))
    base.save_pretrained(tmp_path / "base")
    matrices = [f"{layer}.mlp.experts.{end}" for layer in (1, 3) for end in ("gate_up_proj", "down_proj")]
    options = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", target_parameters=matrices)
    model = peft.get_peft_model(base, options).eval()
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(param, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    ours = open_model(Place(tmp_path / "base", tmp_path / "adapter"), torch.device("cpu"))
    with torch.no_grad():
        logits, expected = (each(input_ids=batch(0)[0]).logits for each in (ours, model))
        with model.disable_adapter():
            assert (model(input_ids=batch(0)[0]).logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_options_tell_peft_which_parameters(runs):
    runs.of("qwen3_moe", "one")
    folder = runs.exported("qwen3_moe", "one") / "adapter"
    options = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(options["target_parameters"]) == sorted(BOTH)
    assert sorted(options["target_modules"]) == sorted(LAYERS)
    shapes = {
        name: tuple(value.shape) for name, value in load_file(folder / "adapter_model.safetensors").items()
    }
    layer = "base_model.model.model.layers.0.mlp.experts"
    assert shapes[f"{layer}.base_layer.lora_A.weight"] == (12, 32) and shapes[f"{layer}.lora_A.weight"] == (
        12,
        16,
    )


def test_without_adapters_a_layer_is_what_it_was():
    from transformers import AutoModelForCausalLM

    from cai_apps.compose.expert_adapters import let_adapters_compute
    from cai_apps.compose.lora import add_adapters

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_of("qwen3_moe")).double()
    ids = batch(0)[0]
    expected = model(input_ids=ids).logits
    add_adapters(model, LORA, LORA.targets)
    model.double()
    let_adapters_compute(model)
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(param)
    assert (model(input_ids=ids).logits - expected).abs().max() > 1e-3
    with without_adapters(model):
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)


def test_beside_experts_of_another_form_other_layers_have_adapters():
    """JetMoE's tokens are sorted before its experts: they have no adapters, and its output layer may."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from cai_apps.compose.lora import add_adapters

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8}
    config = AutoConfig.for_model(
        "jetmoe", **sizes, intermediate_size=16, num_local_experts=4, vocab_size=VOCAB
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LORA, ("kv_proj",))
    assert sum(param.requires_grad for param in model.parameters()) == 2
    with pytest.raises(ConfigError, match="what can have no adapter"):
        add_adapters(model, LORA, ("experts",))


@pytest.mark.parametrize("targets", [(), ("down_proj",), ("q_a_proj", "shared_experts.down_proj")], ids=str)
def test_linear_layers_that_peft_takes_for_experts_are_refused(targets):
    """DeepSeek's shared expert has linear layers with the names of its experts' matrices."""
    config = replace(config_of("deepseek_v3", "one"), lora=replace(LORA, targets=targets))
    with pytest.raises(ConfigError, match="peft would take linear layers"):
        on_meta(config, model_of("deepseek_v3"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": replace(LORA, targets=("experts.gate_proj",))}, "experts.gate_up_proj"),
        ({"lora": replace(LORA, targets=("gate_up_proj",))}, "experts.gate_up_proj"),
        ({"lora": replace(LORA, dropout=0.1)}, "lora.dropout"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    config = replace(config_of("qwen3_moe", "one"), **change)
    with pytest.raises(ConfigError, match=message):
        on_meta(config, model_of("qwen3_moe"))


def tensor_ranks():
    config = replace(run_config(Case(tensor=2), "fp64", STEPS), lora=LORA)
    with pytest.raises(ConfigError, match=r"parallel\.tensor\.size = 2, adapters beside"):
        apply(config, workload(config, model_of("qwen3_moe")), device=torch.device("cpu"))


def test_tensor_ranks_are_refused():
    run_ranks(2, tensor_ranks)
