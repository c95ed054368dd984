"""The rewriter changes import lines, wherever they stand, and nothing else."""

from __future__ import annotations

import ast

import pytest

from cai_apps.compat.colossalai.__main__ import main
from cai_apps.compat.colossalai.remarks import remarks
from cai_apps.compat.colossalai.rewriting import OURS, rewritten

CASES = {
    "import colossalai": f"import {OURS} as colossalai",
    "import colossalai as cai, torch": f"import {OURS} as cai, torch",
    "import os, colossalai.utils as u  # ü": f"import os, {OURS}.utils as u  # ü",
    "import colossalai.nn": f"import {OURS}.nn, {OURS} as colossalai",
    "from colossalai.booster import Booster as B": f"from {OURS}.booster import Booster as B",
    "from colossalai.nn import (  # two\n    optimizer,\n    lr_scheduler,\n)": (
        f"from {OURS}.nn import (  # two\n    optimizer,\n    lr_scheduler,\n)"
    ),
    "def f():\n    é = 1; from colossalai import launch": f"def f():\n    é = 1; from {OURS} import launch",
    "if x:\n\tfrom \\\n\t\tcolossalai.lazy import LazyInitContext": (
        f"if x:\n\tfrom \\\n\t\t{OURS}.lazy import LazyInitContext"
    ),
    "s = 'import colossalai'\n'''\nfrom colossalai import launch\n'''": None,
    "# import colossalai\nfrom colossalai_platform import x\nimport colossalai2": None,
    "from .colossalai import x\nfrom . import colossalai": None,
    "colossalai.launch_from_torch(config={})\r\nx = 1": None,
}


@pytest.mark.parametrize("source", CASES)
def test_only_import_lines_change(source):
    expected = CASES[source]
    got = rewritten(source)
    assert got == (source if expected is None else expected)
    ast.parse(got)
    assert rewritten(got) == got


def test_what_it_imports_is_there():
    names: dict[str, object] = {}
    source = "import colossalai.nn\nfrom colossalai.booster.plugin.dp_plugin_base import DPPluginBase"
    exec(rewritten(source), names)
    assert names["colossalai"].nn.optimizer.HybridAdam and names["colossalai"].__version__ == "0.5.0"
    assert names["DPPluginBase"].__name__ == "DPPluginBase"


def test_the_command_writes_beside_or_in_place_and_prints_both(tmp_path, capsys):
    script = "import colossalai\nplugin = GeminiPlugin(pin_memory=True,\n    shard_param_frac=0.5, wrong=1)\n"
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.py").write_bytes(script.encode())
    (tmp_path / "in" / "b.py").write_text("x = 1\n")
    assert main([str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "-import colossalai\n" in printed and f"+import {OURS} as colossalai\n" in printed
    assert "a.py:2: GeminiPlugin(pin_memory=...): no effect" in printed
    assert "a.py:3: GeminiPlugin(shard_param_frac=...)" in printed and "wrong=...) is no option" in printed
    assert (tmp_path / "out" / "b.py").read_text() == "x = 1\n"
    assert (tmp_path / "in" / "deep" / "a.py").read_text() == script
    assert main([str(tmp_path / "in" / "deep" / "a.py")]) == 0
    assert (tmp_path / "in" / "deep" / "a.py").read_text() == (tmp_path / "out" / "deep" / "a.py").read_text()


def test_a_file_that_is_no_python_stays(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import colossalai\ndef (:\n")
    assert main([str(tmp_path)]) == 1
    assert "is left as it is" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere.py")]) == 1


def test_modules_that_are_not_here_are_named():
    found = remarks("def f():\n    from colossalai.inference.config import InferenceConfig\n")
    assert found == [
        "2: colossalai.inference.config is not here; instead: cai_apps.engine.LLM, or `cai generate`"
    ]
