"""Sampling: tokens follow the distribution of their filters, written out here by hand, and the seed decides."""

from __future__ import annotations

import pytest
import torch

from cai_kernels import KernelError, sample
from cai_kernels.sampling import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["triton", "reference"]
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.05},
]


def row_of(columns: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(columns + start)
    return (torch.randn(columns, generator=random) * 2).to(DEVICE, dtype)


def allowed(row, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Tokens that pass the filters and their probabilities, one token after another in Python's floats."""
    values = row.double().tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if temperature == 0.0:
        return {order[0]: 1.0}
    weight = {
        i: torch.tensor((values[i] - values[order[0]]) / temperature).double().exp().item() for i in order
    }
    if top_k:
        order = [i for i in order if values[i] >= values[order[min(top_k, len(order)) - 1]]]
    total, held, stays = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if stays and held >= top_p * total and values[i] < values[stays[-1]]:
            break
        stays.append(i)
        held += weight[i]
    stays = [i for i in stays if weight[i] >= min_p]
    total = sum(weight[i] for i in stays)
    return {i: weight[i] / total for i in stays}


def chi_square(tokens: torch.Tensor, probabilities: dict[int, float]) -> None:
    """Pearson's test at five deviations of its own; tokens of fewer than five expected draws are taken together."""
    counts = torch.bincount(tokens.cpu()).tolist()
    drawn = {i: n for i, n in enumerate(counts) if n}
    assert set(drawn) <= set(probabilities), set(drawn) - set(probabilities)
    cells, rest = [], [0.0, 0.0]
    for token, p in probabilities.items():
        cell = (drawn.get(token, 0), p * len(tokens))
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    cells += [tuple(rest)] if rest[1] >= 1 else []
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    assert statistic <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize("limits", FILTERS, ids=str)
def test_tokens_follow_the_distribution(limits):
    row, draws = row_of(24), 20_000
    for seed in (5, torch.arange(draws, device=DEVICE) * 977):
        tokens = sample(row.expand(draws, -1), **limits, seed=seed, backend="reference")
        assert tokens.dtype == torch.int64
        chi_square(tokens, allowed(row, **limits))


@pytest.mark.parametrize("limits", [{"temperature": 1.5}, {"min_p": 0.15}], ids=str)
def test_tokens_of_the_kernel_follow_the_distribution(limits):
    row, draws = row_of(24), 150 if DEVICE.type == "cpu" else 20_000
    chi_square(sample(row.expand(draws, -1), **limits, seed=5, backend="triton"), allowed(row, **limits))


def test_philox_gives_the_published_numbers():
    zero = torch.zeros((), dtype=torch.int64)
    assert reference.philox(zero, zero, zero).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("columns", [40, 20_000])
def test_neighbouring_tokens_rows_and_seeds_are_independent(columns):
    rows = 60 if columns > 40 else 4000
    logits = torch.zeros(rows, columns, device=DEVICE)
    tokens = torch.cat([sample(logits, seed=s, backend="reference") for s in range(5)])
    chi_square(tokens * 8 // columns, dict.fromkeys(range(8), 1 / 8))
    chi_square(tokens % 4, dict.fromkeys(range(4), 1 / 4))
    both = (tokens[1:] * 2 // columns) * 2 + tokens[:-1] * 2 // columns
    chi_square(both, dict.fromkeys(range(4), 1 / 4))


SAME = [
    (1, torch.float32),
    (123, torch.float32),
    (123, torch.bfloat16),
    (123, torch.float16),
    (9000, torch.bfloat16),
]


@pytest.mark.parametrize(("columns", "dtype"), SAME)
def test_both_forms_draw_the_same_tokens(columns, dtype):
    random = torch.Generator().manual_seed(columns)
    logits = torch.stack([row_of(columns, dtype, start) for start in range(6)])
    logits[1, ::3] = -torch.inf
    logits[2] = logits[2].abs().neg()
    logits[3] = (logits[3] * 2).round()  # many equal logits
    each = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 3.0]),
        "top_k": torch.tensor([3, 0, 40, 5, columns + 9, 1]),
        "top_p": torch.tensor([0.5, 0.9, 1.0, 0.7, 0.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.01, 0.2, 0.0, 0.3, 1.0]),
        "repetition_penalty": torch.tensor([1.0, 2.0, 0.5, 1.3, 1.0, 1.0]),
    }
    each = {name: value.to(DEVICE) for name, value in each.items()}
    seen = (torch.rand(6, columns, generator=random) < 0.3).to(DEVICE)
    own = torch.arange(6, device=DEVICE) << 40
    some = {"top_p": each["top_p"]}
    for limits, seed in (({}, -3), (FILTERS[-1], own), (some, own), ({**each, "seen": seen}, own)):
        ours, theirs = (sample(logits, **limits, seed=seed, backend=b) for b in BACKENDS)
        assert torch.equal(ours, theirs)
        assert columns == 1 or not logits.gather(1, ours[:, None]).isneginf().any()


def test_both_forms_make_the_same_noise():
    from cai_kernels.sampling import triton

    columns = 2 * triton.BLOCK + 5
    logits = torch.zeros(8, columns, device=DEVICE)
    for seed in (7, torch.arange(8, device=DEVICE) * 2**59):
        ours, theirs = (sample(logits, seed=seed, backend=b) for b in BACKENDS)
        assert torch.equal(ours, theirs) and ours.unique().numel() == 8


def test_filters_keep_what_is_written_down():
    for columns in (1, 2, 50, 400):
        row = row_of(columns)
        for limits in (*FILTERS, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": columns + 1}):
            full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
            numbers = [torch.tensor([[float(value)]], device=DEVICE) for value in full.values()]
            stays = reference.kept(row[None], *numbers)[0]
            assert set(stays.nonzero()[:, 0].tolist()) == set(allowed(row, **limits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_choice(backend):
    logits = torch.stack([row_of(300), torch.zeros(300, device=DEVICE)])
    logits[1, 200] = -0.0
    first = logits.argmax(1)
    assert torch.equal(sample(logits, temperature=0.0, seed=1, backend=backend), first)
    assert torch.equal(sample(logits, temperature=0.0, top_p=0.5, min_p=0.5, seed=1, backend=backend), first)
    assert sample(logits, top_k=1, seed=1, backend=backend)[0] == first[0]
    assert sample(logits, top_p=0.0, seed=1, backend=backend)[0] == first[0]
    lonely = torch.full((2, 300), -torch.inf, device=DEVICE)
    lonely[0, 217] = -1e30
    for limits in FILTERS[-2:]:
        assert sample(lonely, **limits, seed=2, backend=backend).tolist() == [217, 0]
    assert sample(lonely[:0], seed=1, backend=backend).shape == (0,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_share_a_filter(backend):
    logits = torch.tensor([3.0, 3.0, 3.0, 1.0, 0.0, -0.0], device=DEVICE)
    logits = logits.expand(200 if backend == "reference" else 30, -1)
    for limits, stays in (({"top_k": 2}, 3), ({"top_k": 5, "temperature": 50.0}, 6)):
        assert set(sample(logits, **limits, seed=1, backend=backend).tolist()) == set(range(stays))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_repetition_penalty(backend):
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.8]], device=DEVICE)
    for hit, penalty, chosen in (([1, 0, 0, 0], 2.0, 1), ([1, 1, 1, 0], 4.0, 0), ([1, 1, 1, 1], 0.1, 0)):
        seen = torch.tensor([hit], device=DEVICE) == 1
        form = {"repetition_penalty": penalty, "seen": seen, "temperature": 0.0, "backend": backend}
        assert sample(logits, **form).item() == chosen
        assert sample(logits[:, 2:], **{**form, "seen": seen[:, 2:]}).item() == (
            hit[2] == 1 and penalty == 4.0
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides(backend):
    logits = torch.stack([row_of(500)] * 12)
    one, same, other = (sample(logits, seed=s, backend=backend) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.unique().numel() > 4  # rows of one seed differ
    for given in (torch.tensor(1, device=DEVICE), torch.tensor([1], device=DEVICE)):
        assert torch.equal(one, sample(logits, seed=given, backend=backend))
    own = torch.arange(12, device=DEVICE)
    turned = sample(logits, seed=own.flip(0), backend=backend)
    assert torch.equal(sample(logits, seed=own, backend=backend), turned.flip(0))
    drawn = []
    for start in (3, 3, 4):
        torch.manual_seed(start)
        drawn.append(sample(logits, backend=backend))
        random = torch.Generator().manual_seed(start)
        drawn.append(sample(logits, generator=random, backend=backend))
        drawn.append(sample(logits, generator=random, backend=backend))
    for i in range(3):
        assert torch.equal(drawn[i], drawn[i + 3]) and not torch.equal(drawn[i], drawn[i + 6])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_any_strides(backend):
    wide = torch.stack([row_of(64, start=s) for s in range(2)])
    form = {"top_k": 9, "top_p": 0.9, "seed": 4, "backend": backend}
    plain = sample(wide[:, 3:50].contiguous(), **form)
    assert torch.equal(sample(wide[:, 3:50], **form), plain)
    assert torch.equal(sample(wide.t().contiguous().t()[:, 3:50], **form), plain)


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.sampling import triton

    logits = torch.stack([row_of(60)] * 2)
    seed = torch.tensor(3, device=DEVICE)
    values = {"temperature_value": 0.7, "top_k_value": 5.0, "top_p_value": 0.9, "min_p_value": 0.1}
    values["repetition_penalty_value"] = 1.0
    torch.library.opcheck(triton.sample, (logits, None, seed, *[None] * 5), values)
    for backend in BACKENDS:

        def step(x, seed, backend=backend):
            return sample(x * 2, temperature=0.7, top_k=5, top_p=0.9, seed=seed, backend=backend)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(logits, seed), step(logits, seed))


def test_errors_name_the_argument():
    logits = torch.zeros(3, 8, device=DEVICE)
    two = torch.ones(2, device=DEVICE)
    for match, form in (
        ("temperature is out of range", {"temperature": -1.0}),
        ("temperature is out of range", {"temperature": float("inf")}),
        ("temperature does not fit logits", {"temperature": two}),
        ("top_k is out of range", {"top_k": -1}),
        ("top_k is out of range", {"top_k": 2.5}),
        ("top_k has an unsupported dtype", {"top_k": torch.ones(3, device=DEVICE)}),
        ("top_p is out of range", {"top_p": 1.1}),
        ("top_p is on another device", {"top_p": torch.ones(3, device="meta")}),
        ("min_p is out of range", {"min_p": -0.1}),
        ("repetition_penalty is out of range", {"repetition_penalty": 0.0, "seen": logits > 0}),
        ("needs the tokens seen", {"repetition_penalty": 2.0}),
        ("seen does not fit logits", {"repetition_penalty": 2.0, "seen": logits[:2] > 0}),
        ("seen has an unsupported dtype", {"repetition_penalty": 2.0, "seen": logits}),
        ("seed does not fit logits", {"seed": torch.arange(2, device=DEVICE)}),
        ("seed has an unsupported dtype", {"seed": two}),
        ("seed does not fit 64 bits", {"seed": 2**63}),
        ("exclude each other", {"seed": 1, "generator": torch.Generator()}),
    ):
        with pytest.raises(KernelError, match=match):
            sample(logits, **form)
    for wrong in (logits[0], logits[:, :0]):
        with pytest.raises(KernelError, match="logits has a wrong shape"):
            sample(wrong)
    with pytest.raises(KernelError, match="logits has an unsupported dtype"):
        sample(logits.double(), backend="triton")
    with pytest.raises(KernelError, match="takes no gradient"):
        sample(logits.requires_grad_())
