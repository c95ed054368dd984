"""Checks of built wheels: what a package index and a type checker look for is in each.

python tools/wheels.py dist
"""

from __future__ import annotations

import email
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

FIELDS = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "License-File", "Keywords")
"""Fields of the metadata that every wheel has."""
CLASSIFIERS = (
    "Development Status ::",
    "Operating System ::",
    "Programming Language :: Python :: 3",
    "Typing :: Typed",
)
"""Beginnings of classifiers that every wheel has."""
README_BYTES = 500
"""A description that is shorter is none."""


def faults(wheel: Path) -> Iterator[str]:
    """Yields what a wheel lacks, a sentence each."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = [name for name in names if name.endswith(".dist-info/METADATA")]
        if len(described) != 1:
            yield "it has no metadata"
            return
        metadata = email.message_from_bytes(archive.read(described[0]))
        package = str(metadata["Name"]).replace("-", "_")
        if f"{package}/py.typed" not in names:
            yield f"{package}/py.typed is not in it, so type checkers pass over its annotations"
        if not any(name.endswith("/licenses/LICENSE") for name in names):
            yield "the text of the license is not in it"
        strangers = {name.split("/")[0] for name in names} - {package, described[0].split("/")[0]}
        if strangers:
            yield f"it installs more than {package}: {', '.join(sorted(strangers))}"
        yield from _faults_of(metadata)


def _faults_of(metadata: Message) -> Iterator[str]:
    yield from (f"its metadata have no {field}" for field in FIELDS if not metadata[field])
    classifiers = metadata.get_all("Classifier") or []
    for start in CLASSIFIERS:
        if not any(classifier.startswith(start) for classifier in classifiers):
            yield f"no classifier begins with {start!r}"
    if any(classifier.startswith("License ::") for classifier in classifiers):
        yield "a license classifier stands beside a license expression, which indexes refuse"
    if metadata["Description-Content-Type"] != "text/markdown":
        yield "its description is not said to be Markdown"
    if len(str(metadata.get_payload())) < README_BYTES:
        yield "it has no README as its description"


def main(folder: str) -> int:
    """Prints the faults of all wheels of a folder; returns 1 where there are some, or no wheels."""
    wheels = sorted(Path(folder).glob("*.whl"))
    told = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    print("\n".join(told) or f"{len(wheels)} wheels are as they should be")
    return 1 if told or not wheels else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
