"""Master weights in halves: the same numbers but for ties, less memory, and writes that are right or refused."""

from __future__ import annotations

import copy

import over_ranks
import pytest
import torch
from torch import nn
from zero_models import Language

from cai_mesh import checkpoint
from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_zero import (
    Compression,
    Ema,
    MixedPrecision,
    full_state_dict,
    load_full_state_dict,
    shard_module,
    shard_optimizer,
)
from cai_zero.replicated import masters
from cai_zero.replicated.halves import AT_ONCE, join, split

BF16 = torch.bfloat16
WHOLE = MixedPrecision(compute=BF16)
SPLIT = MixedPrecision(compute=BF16, split_master=True)
STEPS = 6
MAKERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
}


def hard_numbers() -> torch.Tensor:
    """Ties, the largest and the smallest, zeros, infinities, numbers that are none; both signs."""
    bits = [0, 0x8000, 0x7FFF, 0x8001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 1, 0x7F800000]
    bits += [0x7FFFFFFF, 0x7F800001, 0x7FC00000]
    return torch.tensor(bits + [b - 2**31 for b in bits]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("at_once", [AT_ONCE, 5])
def test_halves_are_the_number(at_once, monkeypatch):
    monkeypatch.setattr("cai_zero.replicated.halves.AT_ONCE", at_once)
    full = torch.cat([hard_numbers(), torch.randn(103, generator=torch.Generator().manual_seed(0))])
    high, low, back = full.to(BF16), torch.empty(full.shape, dtype=torch.int16), torch.empty_like(full)
    split(full, high, low)
    join(high, low, back)
    number = ~full.isnan()
    assert torch.equal(back.view(torch.int32)[number], full.view(torch.int32)[number])
    assert back[~number].isnan().all() and high[~number].isnan().all()
    tie = full.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(high[number & ~tie], full.to(BF16)[number & ~tie])
    assert (high.float().abs() > full.abs())[number & tie].all()


def test_of_two_as_near_the_upper_half_is_the_one_away_from_zero():
    """Torch takes the even one: in these numbers the other, one in 65,536 of usual ones."""
    full = torch.tensor([0x3F808000, 0x3F828000, 0x00008000]).to(torch.int32).view(torch.float32)
    full = torch.cat([full, -full])
    high, low, back = torch.empty(6, dtype=BF16), torch.empty(6, dtype=torch.int16), torch.empty_like(full)
    split(full, high, low)
    assert (low == -0x8000).all() and (high.float().abs() > full.abs()).all()
    assert (full.to(BF16).float().abs() < full.abs()).all()
    join(high, low, back)
    assert torch.equal(back, full)


def test_a_zero_that_was_written_to_the_upper_half_is_one():
    low = torch.tensor([-0x8000, -1, 0, 7], dtype=torch.int16)
    for zero in (0.0, -0.0):
        full = torch.empty(4)
        join(torch.full((4,), zero, dtype=BF16), low, full)
        assert (full[:3] == 0).all() and full[3].abs() < 1e-40


# -- training --------------------------------------------------------------------------------------------------------


def language(seed=0):
    torch.manual_seed(seed)
    return Language(vocab=29, width=12, layers=2, bias=True)


def batch(step, part=0):
    return torch.randint(29, (3, 7), generator=torch.Generator().manual_seed(100 * step + part))


def loss_of(model, step, part=0):
    ids = batch(step, part)
    return nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def plain(kind):
    """A loop that knows nothing of ZeRO: float32 weights are stepped, and the model has them in bfloat16."""
    model, masters = language().to(BF16), list(language().parameters())
    optimizer = MAKERS[kind](masters)
    for step in range(STEPS):
        for part in range(2):
            loss_of(model, step, part).backward()
            for param, master in zip(model.parameters(), masters, strict=True):
                master.grad = param.grad.float() + (0.0 if part == 0 else master.grad)
                param.grad = None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                rounded = torch.empty(master.numel(), dtype=BF16)
                split(master.detach().flatten(), rounded)
                param.copy_(rounded.view(master.shape))
    return {n: m.detach() for (n, _), m in zip(model.named_parameters(), masters, strict=True)}


def sharded(kind, stage, precision=SPLIT, **options):
    model, mesh = language(), over_ranks.line()
    inner = MAKERS[kind](model.parameters())
    return model, shard_optimizer(inner, mesh, model=model, stage=stage, precision=precision, **options)


def advance(model, optimizer, steps):
    """All ranks see the same samples: their average is exact."""
    for step in steps:
        with optimizer.defer():
            loss_of(model, step, 0).backward()
        loss_of(model, step, 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def bytes_of(optimizer):
    return [chunk.weights.flat.untyped_storage().nbytes() for chunk in optimizer.chunks]


def trained(kind, stage):
    model, optimizer = sharded(kind, stage, overlap_gather=True)
    assert not any(bytes_of(optimizer))
    advance(model, optimizer, range(STEPS))
    assert not any(bytes_of(optimizer))
    full = over_ranks.full_values(optimizer.weights())
    rounded = {n: p.detach().clone() for n, p in model.named_parameters()}
    with over_ranks.rounding_away_from_zero():
        whole, other = sharded(kind, stage, WHOLE)
        advance(whole, other, range(STEPS))
        return full, rounded, over_ranks.full_values(other.weights())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_they_train_as_whole_ones_and_as_a_plain_loop(kind, stage):
    expected = plain(kind)
    for full, rounded, whole in run_ranks(2, trained, kind, stage):
        for name, value in expected.items():
            assert torch.equal(full[name], whole[name]), name
            high = torch.empty(value.numel(), dtype=BF16)
            split(full[name].flatten(), high)
            assert torch.equal(rounded[name], high.view(value.shape)), name
            # gradients of linear layers are rounded to bfloat16 in the plain loop, and not in a chunk
            torch.testing.assert_close(full[name], value, rtol=0, atol=1e-3)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state_of(optimizer):
    return {**optimizer.weights(), **optimizer.state_for_checkpoint()}


def save_it(stage, split_it, directory):
    model, optimizer = sharded("adamw", stage, MixedPrecision(compute=BF16, split_master=split_it))
    advance(model, optimizer, range(3))
    checkpoint.save(directory, state_of(optimizer), step=3).wait()
    return over_ranks.full_values(optimizer.weights())


def load_it(stage, split_it, directory):
    model, optimizer = sharded("adamw", stage, MixedPrecision(compute=BF16, split_master=split_it))
    state = state_of(optimizer)
    checkpoint.load(directory, state)
    optimizer.restore_groups(state["param_groups"])
    optimizer.publish()
    loaded = over_ranks.full_values(optimizer.weights())
    advance(model, optimizer, range(3, STEPS))
    return loaded, over_ranks.full_values(optimizer.weights())


@pytest.mark.parametrize(
    ("before", "after"), [((1, True), (2, True)), ((2, True), (0, False)), ((0, False), (1, True))]
)
def test_checkpoints_have_the_numbers(before, after, tmp_path):
    saved = run_ranks(2, save_it, *before, tmp_path)[0]
    through = run_ranks(3, load_it, *after, tmp_path)
    (straight, *_), *_ = run_ranks(2, trained, "adamw", 1)
    for loaded, ended in through:
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name
            torch.testing.assert_close(ended[name], straight[name], rtol=0, atol=2e-3)


def resumed():
    model, optimizer = sharded("adamw", 1)
    advance(model, optimizer, range(3))
    weights, state = (
        {n: p.detach().clone() for n, p in model.state_dict().items()},
        copy.deepcopy(optimizer.state_dict()),
    )
    advance(model, optimizer, range(3, STEPS))
    second, other = sharded("adamw", 1)
    second.load_state_dict(weights)
    other.load_state_dict(state)
    advance(second, other, range(3, STEPS))
    return over_ranks.full_values(optimizer.weights()), over_ranks.full_values(other.weights())


def test_a_resume_on_the_same_ranks():
    for expected, found in run_ranks(2, resumed):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def complete(stage):
    model, optimizer = sharded("adamw", stage)
    advance(model, optimizer, range(2))
    full = full_state_dict(model, weights=optimizer.weights())
    other, second = sharded("adamw", stage)
    load_full_state_dict(other, full, weights=second.weights())
    second.publish()
    again = over_ranks.full_values(second.weights())
    params = [torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    return full, again, all(params)


def test_full_state_dicts_have_the_numbers():
    (full, again, alike), (_, _, others) = run_ranks(2, complete, 1)
    assert alike and others
    assert all(torch.equal(again[name], value) for name, value in full.items())
    assert any(not torch.equal(v, v.to(BF16).float()) for v in full.values())


def loaded_over():
    """A state dict is loaded into a model that has trained: what it does not change keeps its precision."""
    model, optimizer = sharded("sgd", 1)
    advance(model, optimizer, range(2))
    before = over_ranks.full_values(optimizer.weights())
    masters.rest(optimizer.chunks)
    model.load_state_dict(model.state_dict() | {"head.bias": torch.full((29,), 0.25)})
    after = over_ranks.full_values(optimizer.weights())
    advance(model, optimizer, [2])
    return before, after, bytes_of(optimizer)


def test_a_state_dict_may_be_loaded_later():
    for before, after, held in run_ranks(2, loaded_over):
        assert (after["head.bias"] == 0.25).all() and not any(held)
        assert all(torch.equal(after[n], v) for n, v in before.items() if n != "head.bias")


# -- averages, added parameters, pieces ------------------------------------------------------------------------------


@over_ranks.rounding_away_from_zero()
def averaged(precision):
    model, optimizer = sharded("adamw", 1, precision)
    ema = Ema(model, optimizer, decay=0.75)
    for step in range(3):
        advance(model, optimizer, [step])
        ema.update()
    with ema.applied():
        inside = over_ranks.full_values(optimizer.weights())
        loss = float(loss_of(model, 9).detach())
    after = over_ranks.full_values(optimizer.weights())
    return over_ranks.full_values(ema.state_for_checkpoint()), inside, after, loss


def test_averages_are_of_the_numbers():
    for whole, halves in zip(run_ranks(2, averaged, WHOLE), run_ranks(2, averaged, SPLIT), strict=True):
        for expected, found in zip(whole[:3], halves[:3], strict=True):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert whole[3] == halves[3]


@over_ranks.rounding_away_from_zero()
def grown(precision):
    model = language()
    model.head.requires_grad_(False)
    model.embed.requires_grad_(False)
    first = [p for n, p in model.named_parameters() if "embed" not in n and "head" not in n]
    optimizer = shard_optimizer(
        MAKERS["adamw"](first), over_ranks.line(), model=model, stage=1, precision=precision
    )
    advance(model, optimizer, range(2))
    model.embed.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.embed.parameters()), "lr": 0.1})
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    advance(model, optimizer, range(2, 4))
    return over_ranks.full_values(optimizer.weights())


def test_what_is_trained_later_is_in_halves_too():
    for whole, halves in zip(run_ranks(2, grown, WHOLE), run_ranks(2, grown, SPLIT), strict=True):
        assert whole.keys() == halves.keys() and "head.weight" in whole
        assert all(torch.equal(halves[name], value) for name, value in whole.items())


@over_ranks.rounding_away_from_zero()
def through_pieces(precision):
    """A loop that reads and writes `param_groups`, and keeps views over steps."""
    model, optimizer = sharded("sgd", 1, precision)
    pieces = [p for group in optimizer.param_groups for p in group["params"]]
    views = [p.data for p in pieces]
    sums = []
    for step in range(3):
        advance(model, optimizer, [step])
        with torch.no_grad():
            sums += [float(v.sum()) for v in views] + [float(p.norm()) for p in pieces]
            for piece, view in zip(pieces, views, strict=True):
                piece.mul_(0.5)
                view.add_(0.25)
    return sums, over_ranks.full_values(optimizer.weights())


def test_pieces_may_be_read_and_written():
    for whole, halves in zip(
        run_ranks(2, through_pieces, WHOLE),
        run_ranks(2, through_pieces, SPLIT),
        strict=True,
    ):
        assert whole[0] == halves[0]
        assert all(torch.equal(halves[1][name], value) for name, value in whole[1].items())


# -- refused ---------------------------------------------------------------------------------------------------------


def refused():
    model, optimizer = sharded("adamw", 1)
    advance(model, optimizer, [0])
    with torch.no_grad():
        model.layers[0].up.weight.clamp_(-0.1, 0.1)
    texts = []
    for act in (
        lambda: advance(model, optimizer, [1]),
        lambda: optimizer.weights(),
        lambda: model.head.weight.data,
    ):
        try:
            act()
        except PlanError as error:
            texts.append(str(error))
    return texts


def test_writes_that_cannot_be_followed_are_refused():
    for texts in run_ranks(2, refused):
        assert texts[0].startswith("a parameter was changed in place") and "layers.0.up.weight" in texts[0]
        assert "param.data" in texts[0] and texts[1] == texts[0]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (MixedPrecision(split_master=True), torch.float32),
        (MixedPrecision(compute=torch.float16, split_master=True), torch.float32),
        (MixedPrecision(compute=BF16, master=BF16, split_master=True), torch.float32),
        (MixedPrecision(split_master=True), torch.float64),
    ],
)
def test_other_dtypes_are_refused(precision, dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    with pytest.raises(PlanError, match="split_master needs parameters in bfloat16"):
        shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), None, model=model, precision=precision)


def test_stage_3_and_compressed_weights_are_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(PlanError, match="need parameters that stay"):
        shard_module(model, None, precision=SPLIT)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="upper halves"):
        shard_optimizer(sgd, None, model=model, precision=SPLIT, compression=Compression(weights="int8"))


def test_boxes_say_what_they_lend():
    model = nn.Linear(3, 2)
    optimizer = shard_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), None, model=model, precision=SPLIT
    )
    boxed = optimizer.weights()["weight"]
    assert isinstance(boxed, BoxedTensor) and boxed.dtype is torch.float32 and boxed.pieces[0][1].is_meta
    assert boxed.present.pieces[0][1].shape == (2, 3)


def read_and_written():
    """A loop that looks at master weights, writes to a parameter, and looks again."""
    model, optimizer = sharded("sgd", 1)
    advance(model, optimizer, [0])
    before = over_ranks.full_values(optimizer.weights())
    assert all(boxed.present.pieces for boxed in optimizer.weights().values())
    with torch.no_grad():  # the last chunk is lent: where it is written to can be told
        list(model.parameters())[-1].fill_(0.25)
    held = bytes_of(optimizer)
    loss_of(model, 1).backward()
    after = over_ranks.full_values(optimizer.weights())
    advance(model, optimizer, [2])
    return before, held, after, bytes_of(optimizer)


def test_what_was_read_rests_and_a_write_meanwhile_is_kept():
    for before, held, after, rested in run_ranks(2, read_and_written):
        assert any(held) and not any(rested)
        assert (after["head.bias"] == 0.25).all()
        assert all(torch.equal(after[n], v) for n, v in before.items() if n != "head.bias")


def test_an_optimizer_is_asked_for_halves_only_where_its_class_knows_them():
    """What a wrapper looks up elsewhere would be set on the wrapper, and missed by the optimizer inside."""
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    sgd.takes_halves = lambda: True
    optimizer = shard_optimizer(sgd, None, model=model, precision=SPLIT)
    before = {n: boxed.to_full() for n, boxed in optimizer.weights().items()}
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    optimizer.step()
    for name, boxed in optimizer.weights().items():
        assert torch.equal(boxed.to_full(), before[name] - 0.5)
