"""Writes docs/proof/inputs.md: every bad input, and the first line of what `cai` says to it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bad_inputs import CASES, Case
from further_cases import FURTHER
from hostile_cases import HOSTILE
from running import run

PAGE = Path(__file__).parents[2] / "docs" / "proof" / "inputs.md"
HEAD = """# What bad input is answered with

What `cai` says to input that cannot be: for each the exit code and the first line of the message. Every message also
says what was got or expected, the cause or what to do; no file is touched, and no traceback is shown. The inputs are
data (`bad_inputs.py`, `further_cases.py` and `hostile_cases.py` in `tests/inputs`), as which they are also tested:

```
nox -s tests -- tests/inputs
```

`{here}` is a directory made for the case, with what the name in brackets says. This page is written by
`python tests/inputs/table.py`.

Numbers have their ranges beside the fields of a config (`cai_apps.config.ranges`). Rules that need neither torch nor
transformers are checked first (`rules.py` of each application): they answer within half a second. What other libraries
raise is told in one place (`cai_apps.run.health.user_errors`); what is nobody's input there ends with exit code 1 and
says where its traceback is.
"""


def main() -> None:
    """Run all cases and write the page."""
    lines = [HEAD]
    for group in dict.fromkeys([*CASES, *FURTHER, *HOSTILE]):
        cases = [*CASES.get(group, ()), *FURTHER.get(group, ()), *HOSTILE.get(group, ())]
        lines += [
            "",
            f"## {group[0].upper()}{group[1:]} ({len(cases)})",
            "",
            '<details markdown="1">',
            f"<summary>{len(cases)} rows: input, exit, message</summary>",
            "",
            "| input | exit | message |",
            "|---|---|---|",
            *map(_row, cases),
            "",
            "</details>",
        ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(case: Case) -> str:
    with tempfile.TemporaryDirectory() as directory:
        found = run(case, Path(directory))
    message = found.err[found.err.rfind("\nerror: ") + 1 :].splitlines()[0].replace(directory, "{here}")
    return f"| `{_cell(case.name)}` | {found.code} | {_cell(message.removeprefix('error: '))} |"


def _cell(text: str) -> str:
    text = text.encode("unicode_escape").decode().replace("|", "\\|").replace("`", "'")
    return text if len(text) < 160 else f"{text[:157]}..."


if __name__ == "__main__":
    main()
