from __future__ import annotations

from dataclasses import replace

import pytest

from cai_apps import recipes
from cai_apps.applications.language.config import Config
from cai_apps.config import file as config_file
from cai_mesh.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipes.names())
def test_recipe_survives_writing_and_reading(name, tmp_path):
    config = recipes.load(name)
    assert config_file.read(write(tmp_path, config_file.to_toml(config)), type(config)) == config


def test_strings_survive_quotes_and_backslashes(tmp_path):
    config = Config()
    config = replace(config, data=replace(config.data, source='a "b"\\c\n*.txt'))
    assert config_file.read(write(tmp_path, config_file.to_toml(config)), type(config)) == config


def test_inline_tables_and_integers_for_numbers(tmp_path):
    config = config_file.read(
        write(tmp_path, "[parallel]\ntensor = { size = 2 }\n[optimizer]\nclip = 1\n"), Config
    )
    assert config.parallel.tensor.size == 2
    assert config.optimizer.clip == 1.0
    assert isinstance(config.optimizer.clip, float)


def test_a_value_of_one_of_two_types(tmp_path):
    config = config_file.read(write(tmp_path, "[memory]\ndevice_memory = 22\nhost_memory = '1GB'\n"), Config)
    assert (config.memory.device_memory, config.memory.host_memory) == (22, "1GB")
    assert config_file.read(write(tmp_path, config_file.to_toml(config)), type(config)) == config


@pytest.mark.parametrize(
    "text, parts",
    [
        ("[modle]\nname = 'x'\n", ["'modle'", "did you mean 'model'?"]),
        ("[train]\nstep = 3\n", ["'train.step'", "did you mean 'train.steps'?"]),
        (
            "[parallel]\ntensor = { sizes = 2 }\n",
            ["'parallel.tensor.sizes'", "did you mean 'parallel.tensor.size'?"],
        ),
        ("[model]\nlr = 0.1\n", ["'model.lr'", "did you mean 'optimizer.lr'?"]),
        ("[precision]\ncompute = 'bf15'\n", ["precision.compute", "'bf15'", "did you mean 'bf16'?"]),
        ("[parallel]\nzero = 4\n", ["parallel.zero", "0 or 1 or 2 or 3"]),
        ("[parallel]\nzero = true\n", ["parallel.zero"]),
        ("[train]\nsteps = '3'\n", ["train.steps", "an integer"]),
        ("[memory]\ndevice_memory = 2.5\n", ["memory.device_memory", "an integer or a string"]),
        ("[memory]\ndevice_memory = true\n", ["memory.device_memory", "an integer or a string"]),
        ("[parallel]\ntensor = 2\n", ["parallel.tensor", "a table"]),
        ("[parallel]\ntensor = { sequence = 3 }\n", ["parallel.tensor.sequence", "true or false"]),
        ("[train\n", ["not valid TOML"]),
    ],
)
def test_wrong_file_names_the_key_and_a_way_out(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        config_file.read(write(tmp_path, text), Config)
    for part in parts:
        assert part in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        config_file.read(tmp_path / "none.toml", Config)


def test_unknown_recipe_suggests_one():
    with pytest.raises(ConfigError, match="did you mean 'llama-tiny'"):
        recipes.load("llama-tinny")


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes("\ufeff[train]\nsteps = 7\n".encode())
    assert config_file.read(path, Config).train.steps == 7
