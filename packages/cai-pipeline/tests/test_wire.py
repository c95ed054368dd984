"""Tensors in a byte an element, and back."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner
from cai_pipeline.run.wire import LARGEST, as_hidden, pack, packed_bytes, unpack


def through(tensor: torch.Tensor) -> torch.Tensor:
    sent = pack(tensor)
    assert sent.dtype == torch.uint8 and tuple(sent.shape) == (packed_bytes(tuple(tensor.shape)),)
    return unpack(sent, tuple(tensor.shape), tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 48), (3, 1), (7,), (), (0, 4), (2, 0)])
def test_a_value_is_off_by_a_sixteenth(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 10 ** torch.randn(shape, dtype=torch.float64)).to(dtype)
    found = through(x)
    assert found.shape == x.shape and found.dtype == dtype
    if not x.numel():
        return
    rows = x.double().reshape(-1, x.shape[-1] if x.dim() else 1)
    scale = rows.abs().amax(1, keepdim=True) / LARGEST
    bound = torch.maximum(rows.abs() / 16, scale / 1024) * (1 + 4 * torch.finfo(dtype).eps)
    assert (
        (found.double().reshape(rows.shape) - rows).abs() <= bound + 2 * rows.abs() * torch.finfo(dtype).eps
    ).all()
    assert torch.equal(through(found), found) or dtype != torch.float64, "what is rounded stays as it is"


def test_rows_do_not_share_a_scale() -> None:
    x = torch.tensor([[1.0, 0.5], [1e-20, 2e-20], [0.0, -0.0], [3e38, 1e38]])
    torch.testing.assert_close(through(x), x, rtol=1 / 16, atol=0.0)
    assert torch.equal(through(x)[2], torch.zeros(2))


def test_only_what_is_as_wide_as_hidden_states_is_packed() -> None:
    hidden, bias, memory = (2, 6, 32), (2, 4, 6, 32), (2, 8, 32)
    assert as_hidden([hidden, bias, memory, (2, 6, 16)]) == [True, False, True, False]
    assert as_hidden([hidden]) == [True] and as_hidden([]) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen(value: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = value
    found = through(x)
    assert found[1].isnan().any() and found[[0, 2]].isfinite().all()


def unknown() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    with pytest.raises(PlanError, match="'half'"):
        PipelineRunner(torch.nn.Linear(1, 1), mesh, microbatches=1, loss_fn=torch.sum, wire="half")  # type: ignore[arg-type]


def test_another_form_is_refused() -> None:
    run_ranks(1, unknown)
