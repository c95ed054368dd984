"""Every option of every plugin is here, in the same order and with the same default, and has its line in the guide."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from cai_apps.compat.colossalai.arguments import PLUGINS, REFUSED, meaning, table
from cai_apps.compat.colossalai.signatures import REQUIRED, SIGNATURES

GUIDE = Path(__file__).parents[4] / "docs" / "from-colossalai.md"


@pytest.mark.parametrize("plugin", SIGNATURES)
def test_options_are_those_of_colossalai(plugin):
    here = {f.name: REQUIRED if f.default is MISSING else f.default for f in fields(PLUGINS[plugin])}
    assert list(here.items()) == list(SIGNATURES[plugin].items())
    assert list(inspect.signature(PLUGINS[plugin]).parameters) == list(SIGNATURES[plugin])


@pytest.mark.parametrize("plugin", SIGNATURES)
def test_every_option_has_a_meaning_or_a_reason(plugin):
    for option in SIGNATURES[plugin]:
        assert meaning(plugin, option).text
    assert set(PLUGINS[plugin].no_effect) <= set(SIGNATURES[plugin])
    assert set(REFUSED).isdisjoint(PLUGINS[plugin].no_effect)


@pytest.mark.skipif(not GUIDE.is_file(), reason="an installed package has no guide beside it")
@pytest.mark.parametrize("plugin", SIGNATURES)
def test_the_guide_has_the_table(plugin):
    assert table(plugin) in GUIDE.read_text(encoding="utf-8")
