"""cai export RUN_DIR|CHECKPOINT DIR [--merge], of an alignment run"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.applications.language.commands import export

if TYPE_CHECKING:
    from cai_apps.applications.alignment.task import AlignmentTask


def _task() -> AlignmentTask:
    from cai_apps.applications.alignment.task import ALIGNMENT

    return ALIGNMENT


def run(arguments: list[str]) -> int:
    """Run the command for runs that learn from preferences."""
    return export.run(arguments, _task)
