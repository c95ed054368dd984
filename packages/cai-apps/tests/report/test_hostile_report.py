"""A page in which nothing runs, whatever the run's files, names and texts are."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from cai_apps.report import comparison, page, plots
from cai_apps.report.inline_images import POLICY, picture
from cai_apps.run.files.directory import RunDirectory

SCRIPT = "<script>alert(1)</script>"
BREAK = '"><img src=x onerror=alert(1)><svg/onload=alert(2)>' + SCRIPT
HOSTILE_SVG = f"""<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]>
<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{SCRIPT}<foreignObject><iframe src="javascript:alert(1)"/>
</foreignObject><a href="javascript:alert(1)"><text>&x;</text></a><image href="http://example.org/x.png"/></svg>"""
ALLOWED = {
    *(
        "html",
        "meta",
        "title",
        "style",
        "h1",
        "h2",
        "table",
        "tr",
        "th",
        "td",
        "div",
        "img",
        "pre",
        "h3",
        "p",
        "code",
        "b",
        "span",
        "details",
        "summary",
    ),
}


class Seen(HTMLParser):
    """Tags and attributes as a browser would make elements of."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def check(text: str) -> Seen:
    seen = Seen(text)
    assert {tag for tag, _ in seen.tags} <= ALLOWED
    for tag, attributes in seen.tags:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("href", "srcdoc", "style")
        ]
        if tag == "img":
            assert re.fullmatch(r"data:image/(png|svg\+xml);base64,[A-Za-z0-9+/=]*", attributes["src"] or "")
    metas = [attributes for tag, attributes in seen.tags if tag == "meta" and "http-equiv" in attributes]
    assert [meta["http-equiv"] for meta in metas] == ["Content-Security-Policy"]
    assert metas[0]["content"] == POLICY and "default-src 'none'" in POLICY and "script-src" not in POLICY
    return seen


@pytest.fixture
def run(tmp_path, monkeypatch):
    home = tmp_path / 'run<script>alert(1)<_script>&"'
    home.mkdir()
    run = RunDirectory(home)
    run.plots.mkdir()
    run.config_file.write_text(f"label = '''{BREAK}</pre>{SCRIPT}$title ${{policy}}'''\n")
    record = {"step": 1, BREAK: 1.0, "loss": 2.0}
    monkeypatch.setattr(page, "metrics", SimpleNamespace(read=lambda _: [record, {**record, "step": 2}]))
    return run


def test_nothing_of_a_hostile_run_becomes_an_element(run):
    for name in ("ok", BREAK.replace("/", "_"), "<b>&amp;"):
        (run.plots / f"{name}.svg").write_text(HOSTILE_SVG)
    (run.path / "texts.jsonl").write_text(json.dumps({"step": 1, "name": BREAK, "text": SCRIPT}))
    for folder in ("traces", "snapshots"):
        (run.path / folder).mkdir()
    name = BREAK.replace("/", "_")
    (run.path / "traces" / f"{name}.table.json").write_text(
        json.dumps([{"operator": BREAK, "calls": SCRIPT}, BREAK])
    )
    site = {"bytes": BREAK, "count": SCRIPT, "place": BREAK, "code": SCRIPT}
    fields = dict.fromkeys(("rank", "step", "device", "reason", "allocated_bytes", "asked_bytes"), BREAK)
    (run.path / "snapshots" / f"{name}.json").write_text(json.dumps({**fields, "sites": [site, SCRIPT]}))
    (run.path / "snapshots" / "a.json").write_text(json.dumps({"rank": 0, "message": BREAK}))
    curves = (plots.Curve(BREAK, (BREAK, "loss")), plots.Curve("$\\frac{", ("loss",)))
    shown = page.Page(curves[:1], lambda _: [(BREAK, SCRIPT), (SCRIPT, BREAK)])
    text = page.write_report(run, run.path / "report.html", shown).read_text()
    seen = check(text)
    assert "<script" not in text and "javascript:" not in text
    assert sum(tag == "img" for tag, _ in seen.tags) == 4
    held = [attributes["src"] for tag, attributes in seen.tags if tag == "img"]
    assert base64.b64encode(HOSTILE_SVG.encode()).decode() in "".join(
        held
    )  # as an image, where no script runs


def test_a_picture_says_what_it_is(run):
    assert picture(b"<script>", "svg", alt='"><script>') == (
        '<img alt="&quot;&gt;&lt;script&gt;" src="data:image/svg+xml;base64,PHNjcmlwdD4=">'
    )
    with pytest.raises(KeyError):
        picture(b"", "html")


def test_the_page_takes_the_place_of_a_link(run, tmp_path):
    other = tmp_path / "other"
    other.write_text("theirs")
    (run.path / "report.html").symlink_to(other)
    page.write_report(run, run.path / "report.html", page.Page((), lambda _: []))
    assert other.read_text() == "theirs"
    assert not (run.path / "report.html").is_symlink()


def test_nothing_of_hostile_runs_becomes_an_element_of_a_comparison(run, monkeypatch):
    monkeypatch.setattr(
        comparison, "metrics", SimpleNamespace(read=lambda _: [{"step": 1, BREAK: 1.0, "loss": 2.0}])
    )
    start = dict.fromkeys(
        ("at", "command", "host", "system", "gpu", "ranks", "step", "versions", "git"), BREAK
    )
    (run.path / "starts.jsonl").write_text(
        json.dumps(start | {"versions": {BREAK: SCRIPT}, "git": {"commit": BREAK}})
    )
    shown = page.Page((plots.Curve(BREAK, (BREAK,)),), lambda _: [(BREAK, SCRIPT)])
    text = comparison.write_comparison([run, run], run.path / "both.html", shown).read_text()
    check(text)
    assert "<script" not in text and "javascript:" not in text
