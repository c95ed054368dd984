"""Pages of the documentation are followed to the letter: every command of a page, one after the other, in one folder.

The two shortest run with the rest; the others wait for `nox -s tutorials` and `nox -s matrix`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from cluster import expand, install_slurm, run_pods
from page_blocks import ROOT, block_named, blocks_of, commands, follow

DOCS = ROOT / "docs"
START = ("index", "one-gpu", "larger-than-the-gpu", "several-gpus", "own-loop")
"""Pages of docs/start that have commands; `install` says of each of its blocks why it is not run."""
SHORT = ("own-loop",)
"""Those that run with the rest."""
UNRUN = {
    "pip install nox && nox -s train",
    "pip install torch",
    "pip install ./packages/cai-*",
    "pip install ./packages/cai-mesh ./packages/cai-zero",
    "nox -s build",
    "cai run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train llama-8b",
    "pip install 'cai-apps[lora]'",
    "vllm serve my-tuned-model",
    "pip install 'cai-apps[server]' openai",
    "cai run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train run.toml",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m cai_apps train run.toml",
    "job=$(sbatch --parsable train.sbatch --train.steps 100000)",
    "docker build --target cuda --tag registry.example.org/cai:0.1.0 .",
    "kubectl apply -f train.yaml",
    "pip install notebook",
    "cai fold params_model_1_ptm.npz chains/1A8O.a3m --output folded",
    "for block in model.model.layers:",
}
"""First commands of blocks that are not run: what is installed already, other programs, other machines."""
THINGS = ("parcel", "letter", "bicycle", "refund", "invoice", "key", "ticket", "coat")


def conversations() -> list[dict]:
    """Questions and answers of a shop, 400 of them."""
    answers = ("Send me its number, please.", "I am looking for it.", "It arrives on day {}.")
    return [
        {
            "messages": [
                {"role": "user", "content": f"Where is my {THINGS[number % 8]}, of order {number}?"},
                {"role": "assistant", "content": answers[number % 3].format(number % 7)},
            ]
        }
        for number in range(400)
    ]


def prepare(folder: Path) -> None:
    """Put the model and the file into the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cai_apps.data.chat.tokenizer import train_text_tokenizer

    rows = conversations()
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [message["content"] for row in rows[:100] for message in row["messages"]]
    tokenizer = train_text_tokenizer(texts, 320)
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")


def test_what_is_not_run_is_known():
    folders = [*sorted((DOCS / "start").glob("*.md")), *sorted((DOCS / "tutorials").glob("*.md"))]
    pages = [DOCS / "fine-tuning.md", DOCS / "alignment.md", DOCS / "hugging-face.md", *folders]
    unrun = {commands(block)[0] for block in blocks_of(pages) if block.unrun}
    assert unrun == UNRUN


def start_pages() -> list:
    """The names of the pages, the long ones marked."""
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.matrix) for name in START]


@pytest.mark.parametrize("name", start_pages())
def test_getting_started_is_followed_to_the_letter(name: str, tmp_path: Path):
    assert follow(DOCS / "start" / f"{name}.md", tmp_path)


def test_every_page_of_getting_started_is_followed_or_has_no_commands():
    for page in (DOCS / "start").glob("*.md"):
        has_commands = any(not block.unrun for block in blocks_of([page]) if block.language)
        assert (page.stem in (*START, "install")) == has_commands, page


def test_the_tutorial_is_followed_to_the_letter(tmp_path: Path):
    """In a folder that has what the page says one has: `my-model`, here a small one, and `chats.jsonl`."""
    pytest.importorskip("peft")
    prepare(tmp_path)
    printed = follow(DOCS / "fine-tuning.md", tmp_path)
    for words in (
        "400 records, none broken",
        ": fits",
        "steps of 8 rows read each",
        "resumed from",
        "report.html",
    ):
        assert words in printed, printed
    run = tmp_path / "runs" / "mine"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (run / "report.html").is_file()


@pytest.mark.matrix
def test_the_tutorial_of_preferences_is_followed_to_the_letter(tmp_path: Path):
    """In an empty folder, with a model that is trained on the way; its answer turns from a curt one to a polite one."""
    pytest.importorskip("peft")
    printed = follow(DOCS / "alignment.md", tmp_path)
    for words in ("400 records, none broken", "400 pairs", "report.html", "for AutoModelForSequence"):
        assert words in printed, printed
    answers = [line for line in printed.splitlines() if line in ("Its number?", "Please send me its number.")]
    assert answers[-1] == "Please send me its number." and "Its number?" in answers
    lines = (tmp_path / "runs" / "dpo" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert 0.2 <= first["rewards/accuracies"] <= 0.8  # equal rewards, or equal but for rounding
    assert last["validation_rewards/accuracies"] > 0.9 and last["rewards/margins"] > 0
    texts = (tmp_path / "runs" / "dpo" / "texts.jsonl").read_text()
    assert "Please send me its number." in texts


# --- docs/tutorials --------------------------------------------------------------------------------

TUTORIALS = DOCS / "tutorials"
LINES = {
    "pretrain": ("corpus.txt", "report.html", "comparison.html", "resumed from"),
    "protein": ("70 residues, mean confidence", "mine.cif"),
    "schedule": ("can never start", "idle: 60%"),
    "serve": ("ok", "['notes']", "cai_requests_total", "serving notes"),
    "slurm": ("Submitted batch job", "ZeRO-2, 4 cpu ranks", "resumed from", "report.html"),
    "stable-diffusion": ("UNet2DConditionModel", "report.html"),
    "tensor-and-zero": ("largest difference of a loss", "loss of the next batch"),
    "two-machines": ("ZeRO-2, 4 cpu ranks", "resumed from", "report.html"),
    "classify": (
        "of 200 samples are right",
        "argparse -",
        "logging -",
        "10 classes",
        "report.html",
        "ViTForImageClassification",
        "numbers of adapters",
    ),
    "kernel": ("passed", "failed"),
}
"""What every page prints on its way; all of it is there, or the page has left something out."""


def test_every_tutorial_is_followed():
    pages = {page.stem for page in TUTORIALS.glob("*.md")} - {"index", "notebooks"}
    assert pages == {*LINES, "kubernetes"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(LINES))
def test_a_tutorial_is_followed_to_the_letter(name: str, tmp_path: Path):
    install_slurm(tmp_path)
    printed = follow(TUTORIALS / f"{name}.md", tmp_path)
    assert not [line for line in LINES[name] if line not in printed], printed
    if name in ("two-machines", "slurm"):
        steps = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        expected = 8 if name == "two-machines" else 9
        assert [json.loads(step)["step"] for step in steps] == list(range(1, expected + 1))


@pytest.mark.matrix
def test_the_page_of_hugging_face_is_followed_to_the_letter(tmp_path: Path):
    printed = follow(DOCS / "hugging-face.md", tmp_path)
    assert len([line for line in printed.splitlines() if line.startswith("loss ")]) == 4, printed
    assert (tmp_path / "by-accelerate" / "model.safetensors").is_file()
    assert (tmp_path / "by-lightning.pt").is_file() and (tmp_path / "by-fabric.ckpt").is_file()


def manifests() -> dict[str, Any]:
    """The objects of the manifest on the page of Kubernetes, by their kind."""
    block = block_named(TUTORIALS / "kubernetes.md", "train.yaml")
    return {each["kind"]: each for each in yaml.safe_load_all(block.code)}


def test_the_manifest_holds_together():
    """Names that must be the same are, and the launcher takes the command."""
    from cai_apps.cli import run as launcher

    found = manifests()
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "an env value is a text"
    assert variables["HEAD"] == f"{name}-0.{pod['subdomain']}"
    command = expand(container["command"] + container["args"], variables)
    assert command[:2] == ["cai", "run"]
    options = launcher.parse(command[2:])
    nodes = int(options.nnodes)
    assert nodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    shard = next(text for text in command if text.startswith("--parallel.shard="))
    assert int(shard.partition("=")[2]) == nodes * int(options.nproc_per_node)
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    claim = mounts["/runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert f"--log.directory=/runs/{name}" in command and "/dev/shm" in mounts


PLAIN = {"str": str, "int": int, "bool": bool, "object": object}


def unknown_fields(value: Any, kind: str, models: Any, place: str = "") -> list[str]:
    """What of an object Kubernetes' client does not know: names of fields, and values of another type."""
    if of := re.fullmatch(r"([Ll]ist|[Dd]ict)[\[(](?:str, )?(.*)[\])]", kind):
        inside = value.items() if of[1].lower() == "dict" and isinstance(value, dict) else None
        inside = enumerate(value) if inside is None and isinstance(value, list) else inside
        if inside is None:
            return [f"{place}: {value!r} is no {kind}"]
        return [
            wrong for key, item in inside for wrong in unknown_fields(item, of[2], models, f"{place}.{key}")
        ]
    if kind in PLAIN:
        return [] if isinstance(value, PLAIN[kind]) else [f"{place}: {value!r} is no {kind}"]
    model = getattr(models, kind)
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    wrong = [f"{place}.{key} is unknown" for key in value if key not in names]
    for key, item in value.items():
        if key in names:
            wrong += unknown_fields(item, model.openapi_types[names[key]], models, f"{place}.{key}")
    return wrong


KINDS = {"Service": "V1Service", "PersistentVolumeClaim": "V1PersistentVolumeClaim", "Job": "V1Job"}


@pytest.mark.matrix
def test_the_manifest_is_of_kubernetes_own_schema():
    """Kubernetes' client knows every field and the type of its value; a field that is misspelt is seen."""
    models = pytest.importorskip("kubernetes").client
    for kind, manifest in manifests().items():
        assert not unknown_fields(manifest, KINDS[kind], models, kind)
    job = manifests()["Job"]
    job["spec"]["completionmode"] = job["spec"].pop("completionMode")
    job["spec"]["template"]["spec"]["containers"][0]["args"] = "cai"
    assert len(unknown_fields(job, "V1Job", models)) == 2


@pytest.mark.matrix
def test_pods_of_the_manifest_train_one_model(tmp_path: Path):
    names = {"notes-0.notes:29500": "localhost:29573", "/runs/notes": str(tmp_path / "runs")}
    printed = run_pods(
        manifests()["Job"], tmp_path, names, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    assert "4 cpu ranks" in printed
    assert len((tmp_path / "runs" / "metrics.jsonl").read_text().splitlines()) == 6
