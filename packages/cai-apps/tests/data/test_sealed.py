"""Caches are the user's own, and are read only as they were written."""

from __future__ import annotations

import json
import os
import stat

import pytest

from cai_apps.data import sealed
from cai_apps.data.prepare import prepare
from cai_apps.data.section import Data
from cai_mesh.errors import ConfigError


@pytest.fixture
def data(tmp_path):
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text(f"the cat number {index} sat on the mat. " * 20)
    return Data(source=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"), sequence_length=16)


def flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize("harm", [flip, cut, os.unlink], ids=["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["tokens.bin", "tokenizer/tokenizer.json", "documents.json", "files.json"])
def test_what_is_damaged_is_made_anew_and_told(data, harm, name, capsys):
    first = prepare(data, 300)
    before = first.stream().copy()
    harm(first.directory / name)
    capsys.readouterr()
    again = prepare(data, 300)
    assert again == first and (again.stream() == before).all()
    assert f"the cache {first.directory} is damaged and is made anew: " in capsys.readouterr().out
    assert prepare(data, 300) == first
    assert capsys.readouterr().out == ""
    assert not list((first.directory.parent).glob("unfinished-*"))


def test_a_link_in_the_place_of_a_file_is_not_read(data, tmp_path, capsys):
    first = prepare(data, 300)
    tokens = first.directory / "tokens.bin"
    tokens.rename(tmp_path / "elsewhere")
    tokens.symlink_to(tmp_path / "elsewhere")
    prepare(data, 300)
    assert "tokens.bin is missing" in capsys.readouterr().out
    assert not tokens.is_symlink()


def test_a_link_in_the_place_of_an_entry_is_replaced(data, tmp_path):
    first = prepare(data, 300)
    first.directory.rename(tmp_path / "planted")
    first.directory.symlink_to(tmp_path / "planted")
    assert prepare(data, 300) == first
    assert not first.directory.is_symlink()
    assert (tmp_path / "planted" / "tokens.bin").is_file()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a\\b"])
def test_a_manifest_of_a_cache_names_no_file_elsewhere(data, tmp_path, name, capsys):
    first = prepare(data, 300)
    (first.directory.parent / "outside").write_text("x")
    listed = first.directory / "files.json"
    listed.write_text(json.dumps({**json.loads(listed.read_text()), name: [1, "0"]}))
    prepare(data, 300)
    assert "names a file outside its directory" in capsys.readouterr().out
    assert name not in json.loads(listed.read_text())


def test_a_cache_is_private_whatever_the_umask(data):
    before = os.umask(0)
    try:
        directory = prepare(data, 300).directory
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory.parent, directory)] == [0o700, 0o700]


def test_a_cache_that_others_may_write_is_not_trained_on(data, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write into data\.cache(.|\n)*chmod 700"):
        prepare(data, 300)


def test_large_files_are_sampled_and_their_ends_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "WHOLE", 1000)
    monkeypatch.setattr(sealed, "PART", 10)
    file = tmp_path / "large"
    file.write_bytes(bytes(4000))
    known = sealed.digest(file)
    for place in (0, 3999):
        raw = bytearray(4000)
        raw[place] = 1
        file.write_bytes(raw)
        assert sealed.digest(file) != known


@pytest.mark.parametrize("rank", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_of_several_ranks_the_first_digests(data, monkeypatch, rank):
    first = prepare(data, 300)
    monkeypatch.setattr(sealed, "digest", None)
    monkeypatch.setenv(rank, "1")
    assert sealed.problem(first.directory) is None
    cut(first.directory / "tokens.bin")
    assert "tokens.bin has" in str(sealed.problem(first.directory))
