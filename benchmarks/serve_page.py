"""The page of a server in a real browser: pictures at two widths, light and dark, and what it must never do.

    cai serve MODEL --port 8000
    pip install playwright
    python benchmarks/serve_page.py http://127.0.0.1:8000 --chromium /usr/bin/chromium --out pictures

Everything is done by the keyboard. It fails where the page asks for anything elsewhere, is wider than the window, says
something to the console, or takes what a person or a model writes for markup.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MARKUP = "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"


def event(content: str) -> str:
    return (
        "data: "
        + json.dumps({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]})
        + "\n\n"
    )


def until(page: Any, expression: str) -> None:
    """Wait until something is so; the page's policy lets nobody evaluate text inside of it, playwright's waits too."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"it does not come: {expression}")


def tabs_to(page: Any, name: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(30):
        if page.evaluate("document.activeElement.id") == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the keyboard does not reach {name}")


def visit(browser: Any, options: argparse.Namespace, width: int, scheme: str) -> None:
    credentials = {"username": "me", "password": options.token} if options.token else None
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, http_credentials=credentials
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: said.append(request.url) if _is_elsewhere(request.url, options.url) else None,
    )
    number = 0

    def picture() -> None:
        nonlocal number
        page.wait_for_timeout(300)
        page.screenshot(path=str(options.out / f"{width}-{scheme}-{number}.png"))
        number += 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "wider than the window"

    page.goto(options.url + "/")
    until(page, "document.querySelector('#model').options.length > 0")
    picture()
    tabs_to(page, "question")
    page.keyboard.type(f"Say something {MARKUP}")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('article.assistant p')?.textContent.length > 5")
    picture()
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#stop').hidden")
    assert page.text_content("#status") in ("Stopped.", ""), page.text_content("#status")
    body = event(MARKUP) + event(MARKUP) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    tabs_to(page, "question")
    page.keyboard.type("And now a script")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('article.assistant').length == 2")
    page.wait_for_timeout(500)
    assert page.locator("article.assistant p").last.text_content() == 2 * MARKUP
    assert page.evaluate("window.owned") is None and page.locator("article script, article img").count() == 0
    picture()
    page.unroute("**/v1/chat/completions")
    tabs_to(page, "settings-button")
    page.keyboard.press("Enter")
    picture()
    page.keyboard.press("Escape")
    if width < 800:
        tabs_to(page, "list-button")
        page.keyboard.press("Enter")
        picture()
        page.keyboard.press("Escape")
    tabs_to(page, "theme")
    page.keyboard.press("Enter")
    picture()
    page.reload()
    page.wait_for_timeout(500)
    assert page.locator("#conversations li").count() == 1, "the conversation is not kept"
    assert page.locator("html").get_attribute("data-theme") == ("light" if scheme == "dark" else "dark")
    assert not said, said
    context.close()


def _is_elsewhere(url: str, server: str) -> bool:
    return not url.startswith((server, "data:"))


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--token")
    parser.add_argument("--chromium", help="the browser's program; playwright's own unless given")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in (375, 768, 1440):
                visit(browser, options, width, scheme)
                print(f"{width} px, {scheme}: as it should be")
        browser.close()


if __name__ == "__main__":
    main()
