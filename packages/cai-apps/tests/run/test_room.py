"""Room on the disk: a last checkpoint without any is refused before the first step, one on the way is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cai_apps.run.files import room
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError

SIZE = 100


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk of so many bytes, of which each checkpoint has `SIZE`."""

    def of(total: int, *steps: int):
        for step in steps:
            (tmp_path / f"step-{step}").mkdir()

        def usage(directory):
            return SimpleNamespace(free=total - SIZE * len(list(tmp_path.iterdir())))

        monkeypatch.setattr(room.shutil, "disk_usage", usage)
        return tmp_path

    return of


def left(directory):
    return [path.name for path in checkpoint.steps(directory)]


@pytest.mark.parametrize(
    ("total", "steps", "keep_last", "final", "fits", "after"),
    [
        (100, (), 2, False, True, []),
        (100, (), 2, True, False, []),  # the last one would have none
        (200, (), 2, True, True, []),
        (200, (1,), 2, True, True, ["step-1"]),
        (200, (1, 2), 2, True, True, ["step-2"]),  # two fit: the older one goes first
        (300, (1, 2), 2, True, True, ["step-1", "step-2"]),
        (400, (1, 2), 2, True, True, ["step-1", "step-2"]),
        (200, (1, 2), None, True, False, ["step-1", "step-2"]),  # all are to be kept
        (300, (1,), None, True, True, ["step-1"]),
        (90, (), None, False, False, []),
    ],
)
def test_one_on_the_way(disk, total, steps, keep_last, final, fits, after):
    directory = disk(total, *steps)
    reason = room.make_room(directory, SIZE, keep_last, final=final)
    assert (reason == "") is fits, reason
    assert left(directory) == after


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_last_one_is_refused_before_the_first_step(tmp_path):
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "position": {"step": 1}}
    size = room.checkpoint_bytes(state)
    assert size == 3 * 4 * 4 + 5 * 2 + room.BESIDE
    room.check_final(tmp_path, size)
    with pytest.raises(ConfigError, match=r"(?s)no room for the checkpoint.*checkpoint\.final"):
        room.check_final(tmp_path, 2**60)
