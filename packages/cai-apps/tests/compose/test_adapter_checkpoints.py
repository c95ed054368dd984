"""Checkpoints of adapters lack their base, and load on every layout; so do folders of peft."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import Case, batch, full, microbatches_of, model_config, rate, run_config, train_steps
from safetensors.torch import load_file, save_file

from cai_apps.applications.language.config import LoRA
from cai_apps.applications.language.rules import with_adapter
from cai_apps.applications.language.task import export_adapter, workload
from cai_apps.compose.adapter_files import check_adapter, check_trained_beside
from cai_apps.compose.apply import apply
from cai_apps.config.adapters import read_adapter
from cai_apps.config.sections import Precision
from cai_apps.data.content import digest_of_weights
from cai_apps.data.tokenizer import train_tokenizer
from cai_mesh import checkpoint
from cai_mesh.comm import all_reduce, group
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

peft = pytest.importorskip("peft")

HALF = 2
LORA = LoRA(rank=4, alpha=8, rank_stabilized=True, modules_to_save=("lm_head", "norm"))
ALONE = {"one": Case(zero=0), "host": Case()}
PAIRS = {
    "zero0": Case(data=2, zero=0),
    "zero1": Case(data=2, zero=1),
    "zero2": Case(data=2, zero=2),
    "zero3": Case(data=2, zero=3),
    "zero3-host": Case(data=2, zero=3),
    "tensor2-sequence": Case(tensor=2, sequence=True),
    "pipeline2": Case(pipeline=2),
}
LAYOUTS = ALONE | PAIRS
OTHERS = (4,)
"""How far down the list the layout stands whose checkpoint one goes on from; the matrix takes all."""


def config_of(layout: str, base: Path, lora: LoRA = LORA, dtype: str = "fp64"):
    config = run_config(LAYOUTS[layout], dtype, 2 * HALF)
    residency = "host" if "host" in layout else "device"
    return replace(
        config,
        lora=lora,
        model=replace(config.model, name=str(base), weights="pretrained"),
        memory=replace(config.memory, residency=residency),
        data=replace(config.data, cache=str(base.parent / "cache")),
    )


def session_of(layout: str, base: Path, lora: LoRA = LORA, dtype: str = "fp64"):
    config = config_of(layout, base, lora, dtype)
    return apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))


def steps(session, layout: str, first: int, last: int) -> list[float]:
    if "host" not in layout:
        return train_steps(session, LAYOUTS[layout], first, last)[0]
    losses = []
    for step in range(first, last):
        batches, total = microbatches_of(session, LAYOUTS[layout], step)
        loss = session.step(batches, total=total).clone()
        session.update(rate(step), float(session.norm()))
        all_reduce(loss, group(session.mesh, ("dp_replicate", "dp_shard")))
        losses.append(float(loss))
    return losses


def learned(session) -> dict[str, torch.Tensor]:
    """All that is trained, in full."""
    names = {
        name
        for name in full(session.trained_weights())
        if ".lora_" in name or name in ("lm_head.weight", "model.norm.weight")
    }
    return {name: value for name, value in full(session.trained_weights()).items() if name in names}


def begun(layouts: tuple[str, ...], base: Path, home: Path):
    """By layout: losses and weights of a whole run, which saved itself half way and exported in the end."""
    results = {}
    for layout in layouts:
        session = session_of(layout, base)
        losses = steps(session, layout, 0, HALF)
        checkpoint.save(home / layout, session.state(), step=HALF)
        losses += steps(session, layout, HALF, 2 * HALF)
        folder = home / f"{layout}-adapter"
        export_adapter(
            session.trained_weights(),
            session.config,
            session.model.config,
            folder,
            home / "tokenizer",
            "of the base",
        )
        results[layout] = losses, learned(session)
    return results | ({"with its base": refusal(base, home)} if "one" in layouts else {})


def refusal(base: Path, home: Path) -> str:
    """What a run of adapters says to a checkpoint of all weights, which has frozen ones too."""
    config = config_of("one", base, LoRA())
    work = workload(config, model_config("llama"))
    frozen = replace(work, build=lambda: with_frozen_norm(work.build()))
    assert "model.model.norm.weight" in apply(config, frozen, device=torch.device("cpu")).state()
    session = session_of("one", base, LoRA())
    checkpoint.save(home / "all-weights", session.state(), step=1)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(home / "all-weights", session_of("one", base).state())
    return str(raised.value)


def sources_of(layout: str) -> tuple[str, ...]:
    names = list(LAYOUTS)
    return tuple(names[(names.index(layout) + step) % len(names)] for step in OTHERS)


def resumed(pairs: tuple[tuple[str, str], ...], base: Path, home: Path):
    """By layout and the layout that saved: losses and weights of the rest."""
    results = {}
    for layout, source in pairs:
        session = session_of(layout, base)
        session.loaded(checkpoint.load(home / source, session.state()), HALF)
        results[layout, source] = steps(session, layout, HALF, 2 * HALF), learned(session)
    return results


def with_frozen_norm(model):
    model.model.norm.requires_grad_(False)
    return model


def gone_on(layouts: tuple[str, ...], base: Path, home: Path):
    """What `resumed` gives, and by layout losses and weights of a run that begins with peft's folder."""
    pairs = tuple((layout, source) for layout in layouts for source in sources_of(layout))
    results, read = resumed(pairs, base, home), {}
    for layout in layouts:
        lora = with_adapter(config_of(layout, base, LoRA(adapter=str(home / "peft")))).lora
        session = session_of(layout, base, lora)
        read[layout] = learned(session), steps(session, layout, 0, 1)[0]
    return results, read, rounded(layouts, base, home)


def rounded(layouts: tuple[str, ...], base: Path, home: Path):
    """By layout with bf16: what is trained in master precision, and the folder that is written of it."""
    written = {}
    for layout in [name for name in layouts if "host" not in name]:
        config = replace(config_of(layout, base), precision=Precision(compute="bf16", master="whole"))
        session = apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))
        steps(session, layout, 0, 1)
        state = {name: value for name, value in session.state().items() if name.startswith("model.")}
        folder = home / f"{layout}-bf16"
        weights, model = session.trained_weights(), session.model.config
        export_adapter(weights, config, model, folder, home / "tokenizer", None)
        written[layout] = full(state), folder
    return written


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A base, a tokenizer, and a folder of peft's own with one step of training in it."""
    from transformers import AutoModelForCausalLM

    home = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(model_config("llama"))
    base.save_pretrained(home / "base", max_shard_size="30KB")
    train_tokenizer(["a text"], 300).save_pretrained(home / "tokenizer")
    options = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=r".*\.[12]\..*(q|up)_proj", modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(base, options)
    for param in model.parameters():
        if param.requires_grad:
            param.data.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(home / "peft")
    return home


@pytest.fixture(scope="module")
def ran(home):
    return {
        layout: result
        for world, layouts in ((1, ALONE), (2, PAIRS))
        for layout, result in run_ranks(world, begun, tuple(layouts), home / "base", home, timeout=400)[
            0
        ].items()
    }


@pytest.fixture(scope="module")
def again(ran, home):
    results, read, written = {}, {}, {}
    for world, layouts in ((1, ALONE), (2, PAIRS)):
        more = run_ranks(world, gone_on, tuple(layouts), home / "base", home, timeout=400)[0]
        results, read, written = results | more[0], read | more[1], written | more[2]
    return results, read, written


def test_checkpoints_hold_what_is_trained_and_no_base(ran, home):
    for layout in LAYOUTS:
        names = checkpoint.contents(home / layout).tensors
        weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
        assert weights == ran["one"][1].keys()
        assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
        assert not any(".base_layer." in name or "embed_tokens" in name for name in names)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_goes_on_from_checkpoints_of_other_layouts(layout, ran, again):
    assert ran[layout][0] == pytest.approx(ran["one"][0], rel=1e-9)
    for source in sources_of(layout):
        _compare(again[0][layout, source], ran["one"])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_goes_on_from_checkpoints_of_every_layout(layout, ran, home):
    pairs = tuple((layout, source) for source in LAYOUTS)
    for result in run_ranks(LAYOUTS[layout].world, resumed, pairs, home / "base", home, timeout=400)[
        0
    ].values():
        _compare(result, ran["one"])


def _compare(result, whole) -> None:
    """Compare the rest of a run that was resumed with that of one that was not."""
    (rest, last), (losses, weights) = result, whole
    assert rest == pytest.approx(losses[HALF:], rel=1e-9)
    assert_same_as_one_device(last, weights, tolerance=1e-7)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_training_goes_on_from_what_peft_has_written(layout, home, again):
    from transformers import AutoModelForCausalLM

    values, loss = again[1][layout]
    theirs = load_file(home / "peft" / "adapter_model.safetensors")
    for name, value in theirs.items():
        name = (
            name.removeprefix("base_model.model.")
            .replace("A.weight", "A.default.weight")
            .replace("B.weight", "B.default.weight")
        )
        torch.testing.assert_close(values.pop(name).float(), value, rtol=0, atol=0)
    assert {name for name in values if ".lora_" in name} == set()
    base = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, home / "peft").double()
    ids, labels = batch(0)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    assert loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()).item(), rel=1e-6
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "host" not in name])
def test_masters_are_exported_not_what_is_rounded(layout, again):
    state, folder = again[2][layout]
    written = load_file(folder / "adapter_model.safetensors")
    for name, value in state.items():
        key = f"base_model.model.{name.removeprefix('model.').replace('.default.', '.')}"
        torch.testing.assert_close(written.pop(key), value, rtol=0, atol=0, msg=name)
    assert not written
    assert any((value != value.bfloat16()).any() for value in state.values())


def test_folders_are_the_same_from_every_layout(ran, home):
    first = load_file(home / "one-adapter" / "adapter_model.safetensors")
    for layout in LAYOUTS:
        for name, value in load_file(home / f"{layout}-adapter" / "adapter_model.safetensors").items():
            torch.testing.assert_close(value, first[name], rtol=1e-5, atol=1e-6)


def test_a_base_is_known_by_its_tensors(home, tmp_path):
    from transformers import AutoModelForCausalLM

    def digest(place: Path) -> str:
        return digest_of_weights({"": place}, str(tmp_path / "cache"))

    before = digest(home / "base")
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    model.save_pretrained(tmp_path / "in-one-file")
    assert digest(tmp_path / "in-one-file") == before == digest(home / "base")
    weights = load_file(tmp_path / "in-one-file" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "in-one-file" / "model.safetensors", metadata={"format": "pt"})
    assert digest(tmp_path / "in-one-file") != before
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert digest(tmp_path / "rounded") != before
    file = tmp_path / "rounded" / "model-00001-of-00001.safetensors"
    (tmp_path / "rounded" / "model.safetensors").rename(file)
    entries = dict.fromkeys([*load_file(file), "nowhere"], file.name)
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    with pytest.raises(CheckpointError, match="has no tensor nowhere"):
        digest(tmp_path / "rounded")


def changed(folder: Path, target: Path, **options) -> Path:
    """A copy of a folder of peft with other options; None takes one away."""
    shutil.copytree(folder, target)
    file = target / "adapter_config.json"
    table = json.loads(file.read_text()) | options
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    return target


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": "experts.gate_up_proj"}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"lora_alpha": 0.5}, "whole number"),
        ({"r": None}, "whole number"),
        ({"modules_to_save": None}, "modules_to_save does not name"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_peft_has_and_is_not_here_is_refused_by_name(options, words, home, tmp_path):
    with pytest.raises(ConfigError, match=words):
        read_adapter(changed(home / "peft", tmp_path / "adapter", **options))


def test_options_of_other_versions_are_read(home, tmp_path):
    older = {
        "enable_lora": None,
        "merge_weights": False,
        "lora_alpha": 32.0,
        "peft_version": None,
        "use_rslora": None,
    }
    adapter = read_adapter(changed(home / "peft", tmp_path / "adapter", **older))
    assert (adapter.rank, adapter.alpha, adapter.rank_stabilized) == (3, 32, False)
    assert adapter.modules == ("lm_head",)
    assert len(adapter.targets) == 4  # of a pattern, by the names of the tensors
    ends = ["up_proj", "q_proj", "query_key_value"]  # the last in no layer, which peft lets pass
    listed = changed(home / "peft", tmp_path / "listed", target_modules=ends)
    assert read_adapter(listed).targets == ("q_proj", "up_proj")
    chosen = changed(home / "peft", tmp_path / "chosen", target_modules=ends, layers_to_transform=[1, 2])
    assert read_adapter(chosen).targets == adapter.targets


def test_damaged_folders_are_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="no adapter at"):
        read_adapter(tmp_path)
    for text in ("{", "[]"):
        folder = changed(home / "peft", tmp_path / f"broken{len(text)}")
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            read_adapter(folder)
    pickled = changed(home / "peft", tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        read_adapter(pickled)
    short = changed(home / "peft", tmp_path / "short")
    data = (short / "adapter_model.safetensors").read_bytes()
    (short / "adapter_model.safetensors").write_bytes(data[:-8])
    with pytest.raises(ConfigError, match="not a sound file"):
        read_adapter(short)


def narrower(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value if "lora_" not in name else value[:2] if "lora_A" in name else value[:, :2].contiguous()
        for name, value in weights.items()
    }


def without_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(name for name in weights if "lora_B" in name)
    return {name: value for name, value in weights.items() if name != first}


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("q_proj", "qq_proj"): value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [(narrower, "of another model"), (without_one, "the adapter nothing"), (renamed, "names no layer")],
)
def test_an_adapter_of_another_shape_is_refused(change, words, home, tmp_path):
    folder = changed(home / "peft", tmp_path / "adapter")
    weights = change(load_file(folder / "adapter_model.safetensors"))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        build_and_check(home, folder)


def build_and_check(home: Path, folder: Path) -> None:
    config = with_adapter(config_of("one", home / "base", LoRA(adapter=str(folder))))
    with torch.device("meta"):
        check_adapter(read_adapter(folder), workload(config, model_config("llama")).build())


def test_an_adapter_of_another_base_is_told_or_refused(home, tmp_path):
    adapter = read_adapter(home / "peft")
    assert "its base" in check_trained_beside(replace(adapter, base="meta-llama/other"), "here", "a")
    assert check_trained_beside(replace(adapter, base="here"), "here", "a") == ""
    assert check_trained_beside(replace(adapter, base="there", base_digest="a"), "here", "a") == ""
    with pytest.raises(ConfigError, match="beside other weights"):
        check_trained_beside(replace(adapter, base_digest="b"), "here", "a")


def test_what_a_base_ties_must_be_one_tensor(home, tmp_path):
    from transformers import AutoModelForCausalLM

    table = model_config("llama")
    table.tie_word_embeddings = True
    for tying in (False, True):
        base = AutoModelForCausalLM.from_config(table)
        options = peft.LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=tying
        )
        peft.get_peft_model(base, options).save_pretrained(tmp_path / str(tying))
        config = with_adapter(config_of("one", home / "base", LoRA(adapter=str(tmp_path / str(tying)))))
        with torch.device("meta"):
            model = workload(config, table).build()
        if tying:
            check_adapter(read_adapter(tmp_path / str(tying)), model)
        else:
            with pytest.raises(ConfigError, match="trained apart what its base ties"):
                check_adapter(read_adapter(tmp_path / str(tying)), model)


@pytest.mark.parametrize(
    "wrong", [{"rank": 4}, {"alpha": 7}, {"targets": ("q_proj",)}, {"modules_to_save": ("norm",)}], ids=str
)
def test_options_that_are_not_the_adapters_are_refused(wrong, home):
    config = config_of("one", home / "base", LoRA(adapter=str(home / "peft"), **wrong))
    with pytest.raises(ConfigError, match=f"lora.{next(iter(wrong))} is not that of the adapter"):
        with_adapter(config)
    assert with_adapter(with_adapter(replace(config, lora=LoRA(adapter=str(home / "peft"))))).lora.rank == 3


def test_a_checkpoint_with_its_base_is_of_another_model(ran):
    assert "is of another model" in ran["with its base"]
