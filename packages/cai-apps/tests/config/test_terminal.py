"""What is printed cannot steer a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from cai_apps.config.terminal import PrintableStream, printable, printable_output, terminal

ESCAPES = {
    "\x1b[2J": "\\x1b[2J",  # clears the screen
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",  # names the window
    "\x9b31m": "\\x9b31m",  # CSI in one character
    "a\rb": "a\\rb",  # writes over the line
    "\x08": "\\x08",
    "\u202egnp.exe": "\\u202egnp.exe",  # text from right to left
    "\udc80": "\\udc80",  # a byte of a path that is no text
    "tab\tand line\n": "tab\tand line\n",
    "Zürich, 東京, العربية": "Zürich, 東京, العربية",
}


@pytest.mark.parametrize(("text", "shown"), ESCAPES.items())
def test_what_steers_is_written_out(text, shown):
    assert printable(text) == shown


def test_streams_are_printable_inside_and_as_before_outside(monkeypatch, tmp_path):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with printable_output():
        print(tmp_path / "\x1b[31mrun", "\x07")
        print("\rbar of progress\x1b[A", file=sys.stderr)
        sys.stdout.writelines(["\x1b", "\n"])
        assert terminal() is out, "what draws by itself"
        assert isinstance(sys.stdout, PrintableStream) and not sys.stdout.isatty()
    assert (sys.stdout, sys.stderr) == (out, err)
    assert out.getvalue() == f"{tmp_path}/\\x1b[31mrun \\x07\n\\x1b\n"
    assert err.getvalue() == "\rbar of progress\\x1b[A\n"


def test_a_bar_draws_on_the_terminal_itself(monkeypatch):
    from cai_apps.run.loop.progress import counted

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    with printable_output(), counted(2, "images") as count:
        count(2)
    assert "\x1b" in out.getvalue() and "\\x1b" not in out.getvalue()


def test_paths_of_a_config_are_of_this_machine():
    from cai_apps.config.places import check_local
    from cai_mesh.errors import ConfigError

    for path in ("a/b.txt", "C:/text", "org/model", "~/x", "/a//b", "stdlib", "a:b/c", str(Path("x/y"))):
        check_local("data.source", path)
    for url in (
        "https://a.org/b",
        "s3://bucket/b",
        "hf://datasets/a/b",
        "file:///etc/x",
        str(Path("ftp://a/b")),
    ):
        with pytest.raises(ConfigError, match=r"address of something elsewhere(?s:.*)://"):
            check_local("data.source", url)
    with pytest.raises(ConfigError, match="hub id 'org/name'"):
        check_local("model.name", "https://huggingface.co/org/name/tree/main")
