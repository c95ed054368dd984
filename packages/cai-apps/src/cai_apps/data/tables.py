"""Rows of tables, .csv, .tsv and .parquet, one at a time.

A cell of a .csv is text, and an empty one is no value; of a .parquet it is what its column's type says. Nothing is
guessed: "NA" and "null" are text, and numbers stay as they are written.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cai_apps.data.endings import COLUMNS, DELIMITERS, form_of
from cai_apps.data.files import opened_text
from cai_mesh.errors import DataError, did_you_mean

ROWS_AT_ONCE = 256
"""Rows of a .parquet that are in memory at once."""
LONGEST = min(sys.maxsize, 2**31 - 1)
"""Letters of the longest cell of a .csv; Python's own limit is 131,072."""
Row = tuple[str, dict[str, Any]]
"""The place of a row, and its values by column; what is empty has none."""


def rows_of(path: Path, column: str | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        path: a .csv, .tsv (either may be packed) or .parquet file.
        column: the one column that is read; None: all are.

    Raises:
        DataError: the table is damaged, or has no such column.
    """
    return _parquet_rows(path, column) if form_of(path) == COLUMNS else _csv_rows(path, column)


def check_column(path: Path | str, column: str, columns: Sequence[str]) -> None:
    """Raise DataError where a table has not exactly one column of a name; the message lists those that there are."""
    count = list(columns).count(column)
    if count == 1:
        return
    single = len(columns) == 1 and any(sign in columns[0] for sign in ";\t|")
    raise DataError(
        f"{path} has no column {column!r}" if count == 0 else f"{path} has {count} columns {column!r}",
        got=f"the columns {', '.join(map(repr, columns))}" if columns else "no column",
        expected=f"{column!r}, which data.text_column names",
        cause="its cells are not divided by commas" if single else "",
        fix=f"set data.text_column; {did_you_mean(column, columns)}" if columns else "",
    )


def _csv_rows(path: Path, column: str | None) -> Iterator[Row]:
    with opened_text(path, newline="") as text:
        reader = csv.reader(text, delimiter=DELIMITERS[form_of(path)], strict=True)
        header = _next_cells(path, reader)
        if header is None:
            return
        if column is None:
            for name in header:
                check_column(path, name, header)
        else:
            check_column(path, column, header)
        chosen = [(number, name) for number, name in enumerate(header) if column in (None, name)]
        while True:
            line = reader.line_num + 1
            cells = _next_cells(path, reader)
            if cells is None:
                return
            if len(cells) > len(header):
                raise DataError(
                    f"the row at {path}:{line} has more cells than the table has columns",
                    got=f"{len(cells)} cells, {len(header)} columns",
                    fix='write a text with commas or line feeds between quotes: "..."',
                )
            values = {name: cells[number] for number, name in chosen if number < len(cells)}
            yield f"{path}:{line}", {name: value for name, value in values.items() if value}


def _next_cells(path: Path, reader: Any) -> list[str] | None:
    """Return the cells of the next row that is not blank; None: there is none."""
    line = reader.line_num + 1
    try:
        with _long_cells():
            return next((cells for cells in reader if cells), None)
    except csv.Error as error:
        raise DataError(
            f"the table {path} is broken in the row at line {line}",
            cause=str(error),
            expected='cells with quotes around them, and those inside doubled: "say ""hi"" twice"',
            fix="correct the row; what follows cannot be read",
        ) from None


@contextmanager
def _long_cells() -> Iterator[None]:
    """Inside, cells of a .csv may have `LONGEST` letters; the limit is one of the process."""
    before = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path, column: str | None) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{path} is a parquet file and the package 'pyarrow' is not installed",
            fix="pip install 'cai-apps[data]'",
        ) from None
    try:
        with parquet.ParquetFile(path) as table:
            if column is not None:
                check_column(path, column, table.schema_arrow.names)
            columns = None if column is None else [column]
            number = 0
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", without_nulls(row)
                    number += 1
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"{path} is damaged", expected="a parquet file", cause=str(error)) from None


def without_nulls(value: Any) -> Any:
    """Return a value of a table, without what columns of one type fill in where an object has no such key."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
