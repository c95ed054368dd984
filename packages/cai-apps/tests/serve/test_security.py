"""Who may ask, from where, and what a model's own files may not do."""

from __future__ import annotations

import asyncio
import base64
import re
from importlib import resources
from pathlib import Path

import httpx
import pytest
from chat_tokenizers import tokenizer_of

from cai_apps.applications.language.generate import place_of, renderer_of
from cai_apps.data.chat.messages import read_conversation
from cai_apps.serve.app import FILES, make_app
from cai_apps.serve.model import ServedModel
from cai_apps.serve.options import Limits, ModelSource, ServerOptions
from cai_apps.serve.processes import Processes
from cai_apps.serve.rank import WorkerOptions
from cai_apps.serve.replica import Replica
from cai_apps.serve.state import State
from cai_apps.serve.wire import Ready
from cai_mesh.errors import CaiError, ConfigError, DataError

TOKEN = "s3cret-token"
PATHS = (
    *FILES,
    "/v1/models",
    "/v1/models/toy",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/health",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/../etc/passwd",
    "/page/../../__init__.py",
    "/page/%2e%2e/app.py",
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND")


def app_of(**changes):
    """The routes over a model whose process has not been started."""
    source = ModelSource("toy", Path("toy"))
    replica = Replica(Processes(WorkerOptions(Path("toy")), 60), 10, print)
    replica.ready = Ready(64, 480, 4, 16, True)
    model = ServedModel(source, tokenizer_of("bytes", ("<|end|>",), eos="<|end|>"), None, [replica], 8)
    options = ServerOptions((source,), **changes)
    return make_app(State(options, [model]))


def ask(app, method, path, headers=None, content=None):
    async def asked():
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers, content=content)

    return asyncio.run(asked())


@pytest.fixture(scope="module")
def guarded():
    return app_of(token=TOKEN)


@pytest.mark.parametrize("path", PATHS)
def test_every_route_and_method_asks_for_the_token(guarded, path):
    for method in METHODS:
        answer = ask(guarded, method, path, content=b"{}" if method == "POST" else None)
        assert answer.status_code == 401, method
        assert answer.headers["x-content-type-options"] == "nosniff"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", "Bearer \xff\xfe",
     f"Bearer {TOKEN} {TOKEN}", "Basic %%%", basic(""), basic(TOKEN + "x"), f"Basic {TOKEN}"],
)  # fmt: skip
def test_what_is_not_the_token_is_not(guarded, value):
    assert ask(guarded, "GET", "/health", {"Authorization": value.encode("latin-1")}).status_code == 401


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(TOKEN)])
def test_the_token_is_said_as_a_client_or_a_browser_says_it(guarded, value):
    answer = ask(guarded, "GET", "/health", {"Authorization": value})
    assert answer.status_code == 200 and answer.json() == {"status": "ok"}
    assert "access-control-allow-origin" not in answer.headers


HOSTS = {
    "localhost:8000": 200,
    "LOCALHOST": 200,
    "127.0.0.1:80": 200,
    "[::1]:8000": 200,
    "mine.example": 200,
    "evil.example": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "localhost@evil.example": 403,
    "localhost:notaport": 403,
    "localhost/evil": 403,
    "": 403,
    "\xff": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_forged_host_is_refused(host):
    app = app_of(hosts=("mine.example",))
    assert ask(app, "GET", "/health", {"Host": host.encode("latin-1")}).status_code == HOSTS[host]


ORIGINS = {
    "http://localhost:8000": 200,
    "https://localhost:8000": 200,
    "http://localhost:8001": 403,
    "http://127.0.0.1:8000": 403,
    "http://evil.example": 403,
    "null": 403,
    "": 403,
    "http://localhost:8000.evil.example": 403,
}


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_page_of_another_site_is_refused(path, origin):
    answer = ask(app_of(), "GET", path, {"Host": "localhost:8000", "Origin": origin})
    assert answer.status_code == ORIGINS[origin]


def test_headers_that_come_twice_are_refused():
    headers = [("Host", "localhost"), ("Host", "evil.example")]
    assert ask(app_of(), "GET", "/health", headers).status_code == 400


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", "127.1.2"]
)
def test_a_public_address_needs_a_token(host):
    sources = (ModelSource("toy", Path("toy")),)
    with pytest.raises(ConfigError, match="others could reach the server"):
        ServerOptions(sources, host=host)
    assert not ServerOptions(sources, host=host, token=TOKEN).is_local
    for wrong in ("", " ", "two words", "a\nb", "ä"):
        with pytest.raises(ConfigError, match="the token is none"):
            ServerOptions(sources, host=host, token=wrong)


def test_the_token_is_in_no_text_of_the_options():
    assert TOKEN not in repr(ServerOptions((ModelSource("toy", Path("toy")),), token=TOKEN))


def test_names_and_limits_that_are_none_are_refused():
    for name in ("", "../toy", "a b", "a\n", "x" * 200, "<script>"):
        with pytest.raises(ConfigError, match="a model's name"):
            ModelSource(name, Path("toy"))
    with pytest.raises(ConfigError, match="one name each"):
        ServerOptions((ModelSource("a", Path("a")), ModelSource("a", Path("b"))))
    with pytest.raises(ConfigError, match="queue is out of range"):
        Limits(queue=0)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{% for m in messages %}{{ m.update({'role': 'system'}) }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ range(10**10) | list }}",
    ],
)
def test_templates_run_in_a_sandbox(template):
    tokenizer = tokenizer_of("bytes", ("<|end|>",), eos="<|end|>", template=template)
    conversation = read_conversation({"messages": [{"role": "user", "content": "Hi"}]})
    try:
        written = tokenizer.decode(renderer_of(tokenizer, None).question(conversation))
    except (DataError, ConfigError):
        written = ""
    assert written == ""  # what a sandbox does not show is nothing


def test_an_adapter_of_pickles_is_not_opened(tmp_path, adapter):
    """Nor is one whose base is said by a path that leads nowhere."""
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    text = (adapter / "adapter_config.json").read_text()
    (pickled / "adapter_config.json").write_text(text)
    (pickled / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(CaiError, match=r"is a pickle, which can run code"):
        place_of(pickled)
    (pickled / "adapter_config.json").write_text(
        re.sub(r'("base_model_name_or_path": )"[^"]*"', r'\1"../.."', text)
    )
    (pickled / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    with pytest.raises(CaiError, match=r"\.\./\.\."):
        place_of(pickled)


def test_the_server_listens_at_one_address_and_calls_nobody(server):
    server.post("/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 2})
    inodes = set()
    for pid in (server.process.pid, *server.workers()):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()) if link.is_symlink() else "")
            inodes |= {match[1]} if match else set()
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{server.process.pid}/net/{table}").read_text().splitlines()[1:]
    ]
    sockets = [(row[1], row[3]) for row in rows if row[9] in inodes]
    local = f"0100007F:{server.port:04X}"
    assert (local, "0A") in sockets  # listens
    assert all(address == local for address, _ in sockets), sockets


def test_the_page_loads_nothing_from_outside_and_writes_no_markup():
    answer = ask(app_of(), "GET", "/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    for name, _ in FILES.values():
        text = resources.files("cai_apps.serve").joinpath("page", name).read_text()
        assert not re.search(r"https?://|[\"'(]//|@import|[\s:]url\(\S+\.", text), name
        words = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\bon\w+="
        )
        assert not re.search(words, text), name
    assert not re.search(r"<style|style=|<script(?! type=\"module\" src=\"page/)", answer.text)
