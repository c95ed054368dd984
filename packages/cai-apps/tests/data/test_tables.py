"""Tables, packed files and folders as people have them, read as `datasets`, pandas and pyarrow read them."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma

import pytest

from cai_apps.data import sources
from cai_mesh.errors import DataError

TEXTS = [
    "plain",
    'with "quotes", and\na line feed',
    "",
    "é 北京 🙂",
    "NA",
    "007",
    " spaced ",
    "a,b;c\td",
    "x" * 200_000,
]


def read(path, column="text"):
    return [text or "" for _, text in sources.entries(str(path), column=column)]


def published(kind, path, column="text", **options):
    """The column as `datasets.load_dataset` reads it."""
    datasets = pytest.importorskip("datasets")
    cache = path.parent / "hf"
    table = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(cache), **options)
    return [text or "" for text in table[column]]


@pytest.mark.parametrize(("ending", "delimiter"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_csv_is_read_as_datasets_reads_it(ending, delimiter, encoding, line_end, tmp_path):
    path = tmp_path / f"a{ending}"
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
        writer.writerows(
            [["id", "text", "empty"], *([number, text, ""] for number, text in enumerate(TEXTS))]
        )
    expected = published("csv", path, sep=delimiter, keep_default_na=False)
    assert read(path) == expected == TEXTS
    assert list(sources.documents(str(path))) == [text for text in TEXTS if text]


def test_csv_that_pandas_writes(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "a.csv.gz"
    pandas.DataFrame({"body": [*TEXTS, None], "score": [0.5] * 10}).to_csv(path)
    assert read(path, "body") == [*TEXTS, ""]
    assert read(path, "score") == ["0.5"] * 10


def _tables():
    pyarrow = pytest.importorskip("pyarrow")
    values = [*TEXTS, None]
    return {
        "string": pyarrow.array(values),
        "large_string": pyarrow.array(values, pyarrow.large_string()),
        "dictionary": pyarrow.array(values).dictionary_encode(),
        "string_view": pyarrow.array(values, pyarrow.string_view()),
    }


@pytest.mark.parametrize("form", ["string", "large_string", "dictionary", "string_view"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_parquet_is_read_as_pyarrow_reads_it(form, compression, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = _tables()[form]
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": pyarrow.array(range(len(column))), "text": column})
    with parquet.ParquetWriter(path, table.schema, compression=compression) as writer:
        for start, size in ((0, 3), (3, 1), (4, 6)):  # row groups of several sizes
            writer.write_table(table.slice(start, size), row_group_size=2)
    assert read(path) == [text or "" for text in parquet.read_table(path)["text"].to_pylist()]
    assert read(path) == [*TEXTS, ""]


def test_parquet_and_lines_are_read_as_datasets_reads_them(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [*TEXTS, None]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == published("parquet", tmp_path / "a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\r\n" for text in [*TEXTS, None])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert read(tmp_path / "a.jsonl.gz") == published("json", tmp_path / "a.jsonl.gz")
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    assert read(tmp_path / "b.json") == published("json", tmp_path / "b.json") == TEXTS


PACKING = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("ending", PACKING)
def test_packed_files_are_what_is_in_them(ending, tmp_path):
    for name, text in {
        "a.txt": "\ufeffone\r\ntwo",
        "a.jsonl": '{"text": "one\\ntwo"}',
        "a.csv": 'text\n"one\ntwo"',
    }.items():
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(PACKING[ending](text.encode()))
        assert read(path) == ["one\ntwo"]
    whole = PACKING[ending](
        "".join(f'{{"text": "{number} {hash(number) % 9973}"}}\n' for number in range(4000)).encode()
    )
    for damaged in (whole[:-20], whole[:500] + bytes(20) + whole[520:], b"", b"no such file"):
        path = tmp_path / f"b.jsonl{ending}"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"b\.jsonl.* cannot be unpacked to its end|broken JSONL"):
            read(path)


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_a_column_that_is_not_there_is_told_with_those_that_are(ending, tmp_path):
    path = tmp_path / f"a{ending}"
    if ending == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"id": [1], "content": ["one"]}), path)
    else:
        path.write_text({".csv": "id,content\n1,one\n", ".jsonl": '{"id": 1, "content": "one"}'}[ending])
    with pytest.raises(DataError) as caught:
        read(path)
    assert "'id', 'content'" in str(caught.value) and "data.text_column" in str(caught.value)
    assert read(path, "content") == ["one"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('text\nfine\n"open\nand\nnever closed\n', r"line 3"),
        ('text\n"a"b\n', r"line 2"),
        ("id,text\n1,one\n2,two,three\n", r":3 has more cells"),
        ("text,text\na,b\n", "2 columns 'text'"),
        ("id;text\n1;a\n", "not divided by commas"),
        ("", None),
    ],
)
def test_broken_csv(text, told, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    if told is None:
        assert read(path) == []
        return
    with pytest.raises(DataError, match=told):
        read(path)


def test_csv_that_is_not_utf8_and_columns_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes("text\ncafé\n".encode("cp1252"))
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path / "a.csv")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": [1], "tags": [["a"]]}), tmp_path / "a.parquet")
    for column in ("id", "tags"):
        with pytest.raises(DataError, match="no text in the column"):
            read(tmp_path / "a.parquet", column)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    with pytest.raises(DataError, match="is damaged"):
        read(tmp_path / "b.parquet")


def test_cells_longer_than_pythons_limit_leave_the_limit_as_it_was(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
    texts = sources.documents(str(tmp_path / "a.csv"))
    assert len(next(texts)) == 300_000
    assert csv.field_size_limit() == before


def test_a_folder_is_read_as_datasets_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name in (
        "train-00001-of-00002",
        "train-00000-of-00002",
        "test-00000-of-00001",
        "validation-00000-of-00001",
    ):
        parquet.write_table(
            pyarrow.table({"text": [f"{name} {number}" for number in range(3)]}),
            folder / "data" / f"{name}.parquet",
        )
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# a page")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "train.jsonl").write_text("{}")
    expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "hf"))["text"]
    assert read(folder) == list(expected)
    assert len(expected) == 6


def test_folders_of_text_and_of_several_kinds(tmp_path):
    for name in ("b/c/2.txt", "a.md", "b/1.py", "b/3.txt.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    assert read(tmp_path) == ["a.md", "b/1.py", "b/3.txt.gz", "b/c/2.txt"]
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DataError, match=r"picture\.png"):
        read(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "only this"}')
    assert read(tmp_path) == ["only this"]
    (tmp_path / "y.csv").write_text("text\nand this\n")
    with pytest.raises(DataError, match="several kinds"):
        read(tmp_path)
    (tmp_path / "only" / "test").mkdir(parents=True)
    (tmp_path / "only" / "test" / "a.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match="no training split"):
        read(tmp_path / "only")


def test_several_sources_are_read_in_their_order(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]
    assert list(sources.documents(*paths)) == ["b.txt", "a.txt"]
    assert list(sources.documents(*paths, limit_bytes=6)) == ["b.txt", "a"]
    cache = str(tmp_path / "cache")
    digests = {
        sources.content(*paths, cache=cache),
        sources.content(*reversed(paths), cache=cache),
        sources.content(paths[0], cache=cache),
        sources.content(paths[0], cache=cache, column="body"),
    }
    assert len(digests) == 4
