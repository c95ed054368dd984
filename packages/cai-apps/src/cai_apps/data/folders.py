"""The files of a folder that are trained on: those of one kind, and of one split where their names say of several.

A folder is often a copy of a repository of the hub: shards with a page about them beside. Files of records are then
what is meant, and the words by which `datasets` knows splits (train-00000.parquet, test/a.csv) say which of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cai_apps.data.endings import COLUMNS, DELIMITERS, LINES, LISTED, form_of, packing_of
from cai_mesh.errors import DataError

KINDS = {COLUMNS: COLUMNS, **dict.fromkeys(DELIMITERS, ".csv"), LINES[0]: LINES[0], LISTED: LISTED}
"""Forms of files of records, to the kind that they are."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of splits, to the words in a file's path that say so."""
BESIDE = re.compile(r"(readme|license|licence|dataset_infos?|dataset_card)\b.*", re.IGNORECASE)
"""Names of files about the files of a folder."""


def training_files(folder: Path, *, has_texts: bool) -> list[Path]:
    """Return the files of a folder and of the folders in it that are trained on, by name.

    Args:
        folder: the folder; names in it that begin with a dot are passed over.
        has_texts: whether files of plain text are read where there are none of records.

    Raises:
        DataError: there is no file, or there are several kinds of records, or splits and none to train on.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file, folder))
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        kind = KINDS.get(form_of(file))
        if kind is not None and not BESIDE.fullmatch(file.name):
            by_kind.setdefault(kind, []).append(file)
    if len(by_kind) > 1:
        by_kind.pop(LISTED, None)  # beside records it is about them, as a config.json is
    if len(by_kind) > 1:
        raise DataError(
            f"{folder} has files of several kinds",
            got=", ".join(f"{len(group):,} {kind}" for kind, group in sorted(by_kind.items())),
            expected="files of one kind",
            fix=f"name those that are meant by a glob: '{folder}/**/*{min(by_kind)}'",
        )
    if by_kind:
        return _training_split(folder, *by_kind.values())
    if not (files and has_texts):
        raise DataError(
            f"{folder} has no file to train on",
            got=f"{len(files):,} files" if files else "an empty folder",
            expected="files of records" + (" or of text" if has_texts else f" ({', '.join(KINDS)})"),
        )
    return files


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def split_of(file: Path, folder: Path) -> str | None:
    """Return the split that a file's path within a folder names; None: it names none."""
    path = file.relative_to(folder).as_posix()
    packed = packing_of(file)
    words = {word.lower() for word in re.split(r"[^A-Za-z]+", path.removesuffix(packed))}
    return next((name for name, aliases in SPLITS.items() if words & {*aliases}), None)


def _training_split(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return those of the training split where some files name a split, else all."""
    splits = {file: split_of(file, folder) for file in files}
    named = {split for split in splits.values() if split is not None}
    if not named:
        return list(splits)
    training = [file for file, split in splits.items() if split == "train"]
    if not training:
        raise DataError(
            f"{folder} has no training split",
            got=", ".join(sorted(named)),
            cause="the names of its files say that they are of other splits",
            fix="name the files that are meant by a glob",
        )
    return training
