"""What the model of a run said after its validations, as a table of the page."""

from __future__ import annotations

import html

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop import metrics

SHOWN = 8
"""Steps that are shown of each prompt: the last ones."""


def texts_html(run: RunDirectory) -> str:
    """The texts of a run, by prompt and step; "" where there are none.

    Raises:
        DataError: the file with them is broken.
    """
    if not run.texts.is_file():
        return ""
    by_name: dict[str, list[tuple[int, str]]] = {}
    for record in metrics.read(run.texts):
        name, text = (str(record.get(key, "")) for key in ("name", "text"))
        by_name.setdefault(name, []).append((record["step"], text))
    tables = [
        f"<h3><code>{html.escape(name)}</code></h3><table>"
        + "".join(f"<tr><th>step {step:,}<td><pre>{html.escape(text)}</pre>" for step, text in rows[-SHOWN:])
        + "</table>"
        for name, rows in by_name.items()
    ]
    return f"<h2>Samples</h2>{''.join(tables)}" if tables else ""
