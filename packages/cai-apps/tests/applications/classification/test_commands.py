"""The commands on texts, pairs and pictures, to an export that transformers' pipelines open; what is refused."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from classification_toys import CLASSES, records
from PIL import Image
from safetensors.torch import load_file, save_file
from small_runs import cai
from small_runs import records as metrics
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, pipeline

SMALL = {
    "train.steps": 60,
    "train.global_batch": 12,
    "train.microbatch_size": 6,
    "train.validate_every": 60,
    "parallel.shard": 1,
    "optimizer.lr": 2e-3,
    "lr_schedule.decay_steps": 60,
    "data.sequence_length": 24,
    "log.every": 20,
}


def run(name, directory, cache, **more):
    values = {**SMALL, "log.directory": directory, "data.cache": cache}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    if name == "vit-tiny":
        del values["data.sequence_length"]
    return cai("train", name, *(part for key, value in values.items() for part in (f"--{key}", value)))


def trained(*arguments, **more):
    done = run(*arguments, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("classified")
    (home / "cache").mkdir(mode=0o700)
    return home


@pytest.fixture(scope="module")
def texts(home):
    """A run on texts, and what it printed."""
    data = records(home / "texts.jsonl")
    return home / "texts", trained(
        "bert-tiny", home / "texts", home / "cache", data__source=data, parallel__shard=2
    )


def test_texts_are_classified_and_pipelines_open_the_export(texts):
    directory, printed = texts
    assert "54 texts of 3 classes, 6 for validation" in printed
    assert "classification" in printed and "perplexity" not in printed
    last = metrics(directory)[-1]
    assert last["validation_accuracy"] == 1.0 and "validation_perplexity" not in last
    classify = pipeline("text-classification", str(directory / "export"))
    found = classify(["snow snow", "sun beach sand sun beach sand", "rain cloud rain cloud"])
    assert [answer["label"] for answer in found] == ["cold", "warm", "mild"]
    assert (directory / "export" / "tokenizer.json").is_file()
    done = cai("report", directory)
    assert done.returncode == 0, done.stderr


def test_a_model_is_evaluated_as_scikit_learn_and_pipelines_say(texts, home, tmp_path):
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    directory, _ = texts
    lines = [json.loads(line) for line in records(tmp_path / "all.jsonl", 30).read_text().splitlines()]
    for number in (0, 7, 8):  # these are wrong on purpose
        lines[number]["label"] = "mild" if lines[number]["label"] != "mild" else "warm"
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--data", tmp_path / "all.jsonl", "--batch", 7, "--output", tmp_path / "said.jsonl")
    done = cai("evaluate", directory, *flags, "--json")
    assert done.returncode == 0, done.stderr
    facts, labels = json.loads(done.stdout), [line["label"] for line in lines]
    classify = pipeline("text-classification", str(directory / "export"))
    answers = classify([line["text"] for line in lines])
    predicted = [answer["label"] for answer in answers]
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [(line["label"], line["predicted"]) for line in said] == list(zip(labels, predicted, strict=True))
    assert [line["probability"] for line in said] == pytest.approx([a["score"] for a in answers], abs=1e-4)
    assert facts["accuracy"] == pytest.approx(accuracy_score(labels, predicted)) and facts["accuracy"] < 1
    assert facts["confusion"] == confusion_matrix(labels, predicted, labels=CLASSES).tolist()
    expected = precision_recall_fscore_support(labels, predicted, labels=CLASSES, zero_division=0)
    got = [
        [facts["classes"][name][key] for name in CLASSES] for key in ("precision", "recall", "f1", "samples")
    ]
    np.testing.assert_allclose(got, expected)
    assert facts["macro_f1"] == pytest.approx(np.mean(expected[2]))
    printed = cai("evaluate", directory / "export", "--data", tmp_path / "all.jsonl", "--limit", 9).stdout
    assert "of 9 samples are right" in printed and "taken for" in printed
    done = cai("evaluate", directory, "--data", tmp_path / "all.jsonl", "--label", "lable")
    assert done.returncode and "has no 'lable'" in done.stderr
    lines[4]["label"] = "hot"
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = cai("evaluate", directory, "--data", tmp_path / "all.jsonl")
    assert done.returncode and "none of those that are trained" in done.stderr


def test_samples_are_read_as_the_run_has_read_them(home, tmp_path):
    """A second text, fields and length are the run's, where nobody names others."""
    data = tmp_path / "pairs.jsonl"
    rows = [
        {"one": f"{word} ", "two": other, "same": str(word == other)}
        for word in ("snow", "sun", "rain")
        for other in ("snow", "sun", "rain")
    ] * 6
    data.write_text("\n".join(map(json.dumps, rows)))
    fields = {"data__text": "one", "data__second_text": "two", "data__label": "same", "data__source": data}
    trained("bert-tiny", tmp_path / "run", home / "cache", **fields, train__steps=10, train__validate_every=0)
    done = cai("evaluate", tmp_path / "run", "--data", data, "--output", tmp_path / "said.jsonl")
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["probability"] for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    classify = pipeline("text-classification", str(tmp_path / "run" / "export"))
    pairs = classify([{"text": row["one"], "text_pair": row["two"]} for row in rows])
    assert said == pytest.approx([answer["score"] for answer in pairs], abs=2e-6)
    alone = classify([row["one"] for row in rows])
    assert said != pytest.approx([answer["score"] for answer in alone], abs=2e-6)
    done = cai("evaluate", tmp_path / "run", "--data", data, "--output", tmp_path / "said.jsonl")
    assert done.returncode and "is there already" in done.stderr


def test_published_models_are_evaluated_or_refused(texts, tmp_path):
    """One whose config names no token that fills texts up; one without a head; one whose weights are cut off."""
    from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

    data, export = records(tmp_path / "texts.jsonl", 12), texts[0] / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    names = dict(enumerate(CLASSES))
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=len(tokenizer) + 50, id2label=names)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    done = cai("evaluate", tmp_path / "gpt2", "--data", data, "--json")
    assert json.loads(done.stdout)["samples"] == 12, done.stderr
    shutil.copytree(export, tmp_path / "masked")
    (tmp_path / "masked" / "model.safetensors").unlink()
    save_file(
        {
            name: value
            for name, value in load_file(export / "model.safetensors").items()
            if "classifier" not in name
        },
        tmp_path / "masked" / "model.safetensors",
        {"format": "pt"},
    )
    done = cai("evaluate", tmp_path / "masked", "--data", data)
    assert done.returncode and "lacks weights of its model" in done.stderr, done.stdout
    weights = (export / "model.safetensors").read_bytes()
    (tmp_path / "masked" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    done = cai("evaluate", tmp_path / "masked", "--data", data)
    assert done.returncode and "a fault of cai" not in done.stderr and "model.safetensors" in done.stderr
    done = cai("evaluate", tmp_path / "nowhere", "--data", data)
    assert done.returncode and "a fault of cai" not in done.stderr, done.stderr


def test_adapters_beside_a_model_of_ones_own_classes(texts, home):
    """Trained, gone on with, exported as a folder of peft and merged, where a base that was changed is refused."""
    pytest.importorskip("peft")
    base, data = home / "base", home / "texts.jsonl"
    shutil.copytree(texts[0] / "export", base)
    options = {"model__name": base, "model__weights": "pretrained", "lora__rank": 4, "data__source": data}
    printed = trained("bert-tiny", home / "lora", home / "cache", **options, train__steps=20)
    assert "with num_labels=3" in printed and "begins anew" not in printed
    assert (home / "lora" / "export" / "adapter_model.safetensors").is_file()
    done = cai("evaluate", home / "lora", "--data", data)
    assert done.returncode and "--merge" in done.stderr
    done = run("bert-tiny", home / "lora", home / "cache", **options, train__steps=30)
    assert done.returncode == 0, done.stderr
    assert "step 30/30" in done.stdout and "step 10/30" not in done.stdout
    for flags, name in ((), "adapter_model.safetensors"), (("--merge",), "model.safetensors"):
        place = home / f"lora-{len(flags)}"
        done = cai("export", home / "lora", place, *flags)
        assert done.returncode == 0, done.stderr
        assert (place / name).is_file() and (place / "tokenizer.json").is_file()
    classify = pipeline("text-classification", str(home / "lora-1"))
    assert classify("sun beach sand sun beach sand")[0]["label"] == "warm"
    done = cai("export", texts[0], home / "nothing", "--merge")
    assert done.returncode and "there is nothing to merge" in done.stderr
    weights = load_file(base / "model.safetensors")
    save_file(
        {name: value + 1e-3 for name, value in weights.items()}, base / "model.safetensors", {"format": "pt"}
    )
    done = cai("export", home / "lora", home / "other", "--merge")
    assert done.returncode and "beside another base" in done.stderr


def test_a_checkpoint_is_exported(texts, home):
    directory, _ = texts
    done = cai("export", directory, home / "again")
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "tokenizer.json"):
        assert (home / "again" / name).read_bytes() == (directory / "export" / name).read_bytes()
    assert (home / "again" / "config.json").read_text() == (directory / "export" / "config.json").read_text()


def test_a_run_goes_on_and_refuses_other_classes(texts, home):
    directory, _ = texts
    source = home / "texts.jsonl"
    printed = trained(
        "bert-tiny", directory, home / "cache", data__source=source, parallel__shard=1, train__steps=61
    )
    assert "resumed from" in printed
    other = home / "others.jsonl"
    other.write_text(source.read_text().replace('"cold"', '"icy"'))
    done = run("bert-tiny", directory, home / "cache", data__source=other, train__steps=70)
    assert done.returncode == 2 and "name of class" in done.stderr


def test_an_export_is_gone_on_with_under_its_own_classes(texts, home):
    """Two classes of three are in these data: the head stays, and so do the numbers of its classes."""
    directory, _ = texts
    rows = [line for line in (home / "texts.jsonl").read_text().splitlines() if '"mild"' not in line]
    (home / "two.jsonl").write_text("\n".join(rows))
    options = {"model__name": directory / "export", "model__weights": "pretrained"}
    printed = trained(
        "bert-tiny", home / "more", home / "cache", data__source=home / "two.jsonl", train__steps=2, **options
    )
    assert "of 3 classes" in printed and "begins anew" not in printed
    assert metrics(home / "more")[0]["loss"] < 0.2
    numbers = records(home / "numbered.jsonl", 30).read_text()
    for number, name in enumerate(("red", "green", "blue", "grey")[:3]):
        numbers = numbers.replace(f'"{CLASSES[number]}"', f'"{name}"')
    (home / "numbered.jsonl").write_text(numbers)
    printed = trained(
        "bert-tiny",
        home / "colours",
        home / "cache",
        data__source=home / "numbered.jsonl",
        train__steps=2,
        **options,
    )
    assert "the head begins anew" in printed
    model = AutoModelForSequenceClassification.from_pretrained(home / "colours" / "export")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_pairs_of_texts_of_a_table(home):
    """Numbers of classes in a .csv, which is all text; validation of a file of its own."""
    rows = [json.loads(line) for line in records(home / "pairs.jsonl", second=True).read_text().splitlines()]
    for name, some in (("pairs.csv", rows[:50]), ("held.csv", rows[50:])):
        with (home / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["premise", "hypothesis", "y"])
            table.writerows([row["text"], row["other"], CLASSES.index(row["label"])] for row in some)
    options = {
        "data__source": home / "pairs.csv",
        "data__validation_source": home / "held.csv",
        "data__text": "premise",
        "data__second_text": "hypothesis",
        "data__label": "y",
    }
    printed = trained("bert-tiny", home / "pairs", home / "cache", train__steps=2, **options)
    assert "50 texts of 3 classes, 10 for validation" in printed
    model = AutoModelForSequenceClassification.from_pretrained(home / "pairs" / "export")
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    classify = pipeline("text-classification", str(home / "pairs" / "export"))
    assert classify({"text": "snow ice", "text_pair": "day 3"})["label"].startswith("LABEL_")


def test_a_directory_of_datasets_has_names_of_classes(home):
    """As GLUE's have them: sentence, label (ClassLabel), idx; their order is not that of the alphabet."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "sentence": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["warm", "cold", "mild"]),
            "idx": datasets.Value("int32"),
        }
    )
    columns = {"sentence": ["sun", "ice", "rain"] * 10, "label": [0, 1, 2] * 10, "idx": list(range(30))}
    table = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(home / "glue")
    options = {"data__source": home / "glue", "data__text": "sentence", "train__steps": 2}
    printed = trained("bert-tiny", home / "named", home / "cache", **options)
    assert "27 texts of 3 classes" in printed
    facts = json.loads((home / "named" / "classes.json").read_text())
    assert facts["classes"] == ["cold", "mild", "warm"]


def test_pictures_of_a_folder(home):
    random = np.random.default_rng(0)
    for number, name in enumerate(("dark", "light")):
        (home / "pictures" / name).mkdir(parents=True)
        for picture in range(20):
            pixels = random.integers(0, 100, (20, 30, 3), dtype=np.uint8) + 150 * number
            Image.fromarray(pixels.astype(np.uint8)).save(home / "pictures" / name / f"{picture}.png")
    printed = trained("vit-tiny", home / "vit", home / "cache", data__source=home / "pictures")
    assert "36 pictures of 2 classes, 4 for validation" in printed
    assert metrics(home / "vit")[-1]["validation_accuracy"] == 1.0
    export = home / "vit" / "export"
    processor = json.loads((export / "preprocessor_config.json").read_text())
    model = AutoModelForImageClassification.from_pretrained(export)
    picture = Image.open(home / "pictures" / "light" / "3.png").resize((16, 16))
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) * processor["rescale_factor"]
    mean, std = (torch.tensor(processor[name])[:, None, None] for name in ("image_mean", "image_std"))
    with torch.no_grad():
        logits = model(pixel_values=((pixels - mean) / std)[None]).logits
    assert model.config.id2label[int(logits.argmax())] == "light"
    done = cai("evaluate", export, "--data", home / "pictures", "--output", home / "said.jsonl", "--json")
    assert json.loads(done.stdout)["confusion"] == [[20, 0], [0, 20]], done.stderr
    said = [json.loads(line) for line in (home / "said.jsonl").read_text().splitlines()]
    same = next(line for line in said if line["sample"] == str(home / "pictures" / "light" / "3.png"))
    assert same["probability"] == pytest.approx(float(logits.softmax(-1).max()), abs=0.05)  # it was cropped


def test_a_plan_says_what_it_needs():
    done = cai("plan", "bert-tiny")
    assert done.returncode == 0 and "bert-tiny" in done.stdout, done.stderr


WRONG = {
    "no such field": ({"text": "a", "label": "b"}, {"data.label": "class"}, "has no 'class'"),
    "no class": ({"text": "a", "label": None}, {}, "has no 'label'|neither a name"),
    "a class of lists": ({"text": "a", "label": [1]}, {}, "neither a name nor a number"),
    "no text": ({"text": 3, "label": "b"}, {}, "is no text"),
    "one class": ({"text": "a", "label": "b"}, {}, "fewer than two classes"),
    "too long": ({"text": "a", "label": "b"}, {"data.sequence_length": 400}, "no texts of this length"),
    "a language model's": ({"text": "a", "label": "b"}, {"model.name": "dit"}, "no model 'dit'"),
    "fields twice": ({"text": "a", "label": "b"}, {"data.second_text": "text"}, "another field already"),
    "no such file": (None, {"data.source": "nowhere.csv"}, "matches no file"),
    "sequence": ({"text": "a", "label": "b"}, {"parallel.tensor.sequence": "true"}, "one class"),
    "context": ({"text": "a", "label": "b"}, {"parallel.context.size": 2}, "context divides rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_told(case, home, tmp_path):
    record, changes, message = WRONG[case]
    (tmp_path / "one.jsonl").write_text(json.dumps(record) + "\n")
    values = {**SMALL, "data.source": tmp_path / "one.jsonl", "log.directory": tmp_path / "run"}
    values |= {"data.cache": home / "cache"} | changes
    done = cai("train", "bert-tiny", *(part for key, value in values.items() for part in (f"--{key}", value)))
    assert done.returncode == 2, done.stdout + done.stderr
    assert any(part in done.stderr for part in message.split("|")), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run" / "checkpoints").exists()
