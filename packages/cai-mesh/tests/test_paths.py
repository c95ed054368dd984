"""Names stay in their directory, and nothing is written through a link."""

from __future__ import annotations

import os
import stat

import pytest

from cai_mesh.errors import CheckpointError, ConfigError, DataError
from cai_mesh.files import paths


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a//b", "./a", ".", "", "a/", "..\\x", "C:\\x", "a\0b",
        "a\nb", None, 3, ["a"],
    ],
)  # fmt: skip
def test_names_that_leave_are_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="names a file outside its directory; nothing was read"):
        paths.inside(tmp_path, name)
    with pytest.raises(DataError, match="the index"):
        paths.inside(tmp_path, name, said_by="the index", error=DataError)


@pytest.mark.parametrize("name", ["a", "a.b", "..a", "a..", "a/b.safetensors", "köln", ".metadata"])
def test_names_that_stay_are_joined(name, tmp_path):
    assert paths.inside(tmp_path, name) == tmp_path / name


def test_a_file_takes_the_place_of_a_link(tmp_path):
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / "mine").symlink_to(other)
    paths.write_text(tmp_path / "mine", "new")
    assert other.read_text() == "theirs"
    assert not (tmp_path / "mine").is_symlink() and (tmp_path / "mine").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(TypeError), paths.replaced(tmp_path / "file") as file:
        file.writelines([b"half", "no bytes"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a symbolic link; nothing is written through one"):
        paths.appended(tmp_path / "link")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("target", ["directory", "file", "nothing"])
def test_a_directory_takes_the_place_of_links_on_its_way(tmp_path, name, target):
    (tmp_path / "directory" / "b" / "c").mkdir(parents=True)
    (tmp_path / "file").write_text("theirs")
    home = tmp_path / "home"
    link = home / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / target)
    made = paths.own_folder(home / "a" / "b" / "c", below=home)
    (made / "new").write_text("ours")
    assert made.resolve() == made
    assert not list(tmp_path.glob("directory/**/new"))
    assert (tmp_path / "file").read_text() == "theirs"
    (made / "more").symlink_to(tmp_path / "directory")
    paths.remove(made)
    paths.remove(made)
    assert (tmp_path / "directory" / "b" / "c").is_dir()


def test_links_are_found_wherever_they_lie(tmp_path):
    run, deep = tmp_path / "run", tmp_path / "run" / "plots" / "old"
    deep.mkdir(parents=True)
    (tmp_path / "entry").symlink_to(run)
    paths.refuse_links(tmp_path / "entry")
    (deep / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="old/link is a symbolic link"):
        paths.refuse_links(tmp_path / "entry")
    paths.refuse_links(run, shallow=run / "plots")
    (run / "plots" / "new").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="plots/new is a symbolic link"):
        paths.refuse_links(run, shallow=run / "plots")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        paths.folder(run / "plots" / "new")


@pytest.fixture
def without_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("without_umask")
def test_modes_do_not_depend_on_the_umask(tmp_path):
    paths.write_text(tmp_path / "a", "secret")
    paths.appended(tmp_path / "b").close()
    assert [mode(tmp_path / name) for name in "ab"] == [0o600, 0o600]
    assert mode(paths.folder(tmp_path / "c")) == 0o755
    assert mode(paths.private_folder(tmp_path / "d", "cache")) == 0o700


@pytest.mark.parametrize("open_to", [0o770, 0o707, 0o1777])
def test_a_cache_that_others_may_write_is_refused(tmp_path, open_to):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(open_to)
    with pytest.raises(ConfigError, match=r"others may write into data\.cache(.|\n)*chmod 700"):
        paths.private_folder(tmp_path / "cache", "data.cache")


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"data\.cache(.|\n)*another user(.|\n)*directory of your own"):
        paths.private_folder(tmp_path, "data.cache")


def test_a_cache_may_be_a_link_of_ones_own_and_no_file(tmp_path):
    (tmp_path / "far").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("far")
    assert paths.private_folder(tmp_path / "cache", "data.cache") == tmp_path / "cache"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        paths.private_folder(tmp_path / "file", "data.cache")
