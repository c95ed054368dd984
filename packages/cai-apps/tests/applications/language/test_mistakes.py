"""What goes wrong first when somebody fine-tunes: told before memory is allocated, with advice that works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cai_apps import recipes
from cai_apps.applications.language.rules import check_settings
from cai_apps.applications.language.task import check_enough
from cai_apps.compose.models import read_model_config
from cai_apps.config.file import change
from cai_apps.config.sections import LoRA
from cai_apps.config.validation import microbatches
from cai_apps.data.chat.messages import read_conversation
from cai_mesh.errors import ConfigError, DataError


@pytest.mark.parametrize("size", [1, 2, 3, 5, 15])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_for_few_conversations_is_one_that_works(size, ranks):
    """The advice is followed: sizes then agree, and the data are enough."""
    config = change(recipes.load("sft-tiny"), {"parallel.shard": ranks})
    with pytest.raises(DataError) as caught:
        check_enough(config, size)
    advice = str(caught.value).partition("fix:")[2]
    if "parallel.shard" in advice:
        assert size < ranks
        return
    changes = {key: int(value) for key, value in re.findall(r"(train\.\w+) to (\d+)", advice)}
    changed = change(config, changes)
    assert microbatches(changed) >= 1
    check_enough(changed, size)


@pytest.mark.parametrize(
    "name", ["./nothing", "~/nothing", "/nothing/here", "a/b/c", "model/config.json", "model.safetensors"]
)
def test_a_path_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ConfigError, match="is a path, and there is no directory"):
        read_model_config(name)


def test_targets_with_a_comma():
    config = replace(recipes.load("sft-tiny"), lora=LoRA(rank=4, targets=("q_proj, v_proj",)))
    with pytest.raises(ConfigError, match=r"--lora\.targets q_proj v_proj"):
        check_settings(config)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "a", "answer": "b"}, "rename 'question' to 'prompt' and 'answer' to 'completion'"),
        (
            {"id": 1, "query": "a", "response": "b"},
            "rename 'query' to 'prompt' and 'response' to 'completion'",
        ),
        ({"mesages": []}, "did you mean 'messages'?"),
        ({"text": "a"}, "rename the keys, or convert the file"),
    ],
    ids=str,
)
def test_keys_of_other_files_are_renamed(record, words):
    with pytest.raises(DataError) as caught:
        read_conversation(record)
    assert words in str(caught.value)
