"""What people do with logits, hooks, weights and losses: a swapped model gives what its plain twin gives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from cai_kernels import KernelError, swap
from cai_kernels.swap.logits import Logits

WIDTH, VOCAB = 8, 11
IDS = torch.randint(0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, bias=False, tied=False):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def loss_of(logits, ids=IDS, **options):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1), **options)


def with_gradients(model, *losses):
    sum(losses).backward()
    return [loss.detach() for loss in losses] + [p.grad for p in model.parameters() if p.grad is not None]


def step(model, loss):
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


# -- hooks -------------------------------------------------------------------------------------------------------------


def seen_by_a_hook(model):
    seen = []
    model.head.register_forward_hook(lambda module, given, out: seen.append(out.detach() * len(given)))
    return [*with_gradients(model, loss_of(model(IDS))), *seen]


def changed_by_a_hook(model):
    model.head.register_forward_hook(lambda module, given, out: out * 3)
    model.head.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return with_gradients(model, loss_of(model(IDS)))


def backward_hook(model):
    seen = []
    model.head.register_full_backward_hook(lambda module, given, out: seen.append(out[0]))
    return [*with_gradients(model, loss_of(model(IDS))), *seen]


def global_hook(model):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: seen.append(out.detach() * 1) if module is model.head else None
    )
    try:
        return [*with_gradients(model, loss_of(model(IDS))), *seen]
    finally:
        handle.remove()


def hook_on_logits(model):
    seen, logits = [], model(IDS)
    logits.register_hook(lambda gradient: seen.append(gradient))
    logits.register_hook(lambda gradient: gradient * 2)
    return [*with_gradients(model, loss_of(logits)), *seen]


def retained_gradient(model):
    logits = model(IDS)
    logits.retain_grad()
    return [*with_gradients(model, loss_of(logits)), logits.grad]


# -- writing -----------------------------------------------------------------------------------------------------------


def written(write):
    def use(model):
        logits = model(IDS)
        write(logits)
        return with_gradients(model, loss_of(logits), logits.exp().mean())

    use.__name__ = "written"
    return use


def set_items(logits):
    logits[:, :, 3] = -5.0


def divide(logits):
    logits.div_(2.5)


def masked_fill(logits):
    logits.masked_fill_(torch.arange(VOCAB) == 2, -3.0)


def through_a_view(logits):
    logits[:, 1:][..., 2] = -4.0


def through_another_shape(logits):
    logits.view(-1, VOCAB)[:, 1].mul_(3)


def through_float(logits):
    logits.float().mul_(3)


def without_gradients(logits):
    with torch.no_grad():
        logits[..., 4] = -2.0


def augmented(logits):
    logits *= 2


WRITES = [
    set_items,
    divide,
    masked_fill,
    through_a_view,
    through_another_shape,
    through_float,
    without_gradients,
    augmented,
]


def base_after_its_view(model):
    logits = model(IDS)
    view, copied, flat = logits[:, 1:], logits[:, 1:].reshape(-1, VOCAB), logits.flatten(0, 1)
    with torch.no_grad():
        logits[..., 2] = 7.0
    return with_gradients(
        model, F.cross_entropy(flat, IDS.flatten()), F.cross_entropy(copied, IDS[:, 1:].flatten()), view.sum()
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def read_after_a_step(model):
    logits = model(IDS)
    step(model, loss_of(logits))
    return [logits.argmax(-1), logits.detach()]


def other_weights(model):
    others = {n: p.detach() * 2 for n, p in model.named_parameters()}
    logits = torch.func.functional_call(model, others, (IDS,))
    return [loss_of(logits), logits.sum()]


def assigned(model):
    logits = model(IDS)
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    return [logits.sum(), loss_of(logits), *with_gradients(model, loss_of(model(IDS)))]


def retied(model):
    model.head.weight = model.embed.weight
    return with_gradients(model, loss_of(model(IDS)))


def loaded(model):
    model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()}, assign=True)
    return with_gradients(model, loss_of(model(IDS)))


def resized(model):
    model.head.weight = nn.Parameter(torch.cat((model.head.weight.detach(), torch.ones(2, WIDTH))))
    if model.head.bias is not None:
        model.head.bias = nn.Parameter(torch.ones(VOCAB + 2))
    return [model(IDS), F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())]


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized(model):
    parametrize.register_parametrization(model.head, "weight", Doubled())
    return with_gradients(model, loss_of(model(IDS)))


def frozen(model):
    model.requires_grad_(False)
    model.mix.requires_grad_(True)
    return with_gradients(model, loss_of(model(IDS)))


def converted(model):
    return [*with_gradients(model.double(), loss_of(model(IDS))), model.bfloat16()(IDS)]


def copied(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.mul_(2)
    return [*with_gradients(other, loss_of(other(IDS))), pickle.loads(pickle.dumps(model))(IDS), model(IDS)]


# -- modes -------------------------------------------------------------------------------------------------------------


def no_grad(model):
    with torch.no_grad():
        logits = model(IDS)
        flags = [torch.tensor(logits.requires_grad), torch.tensor(logits.is_leaf)]
        results = [loss_of(logits), torch.from_numpy(logits.numpy())]
    return [*flags, *results, loss_of(model(IDS).detach()), loss_of(logits)]


def inference(model):
    with torch.inference_mode():
        return [loss_of(model(IDS)).clone(), model(IDS).clone()]


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS)
        inside = loss_of(logits)
    return [inside, logits, loss_of(logits), F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())]


def gradients_by_transform(model):
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return list(
        torch.func.grad(lambda w: loss_of(torch.func.functional_call(model, w, (IDS,))))(weights).values()
    )


def a_sample_each(model):
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def one(w, ids):
        return loss_of(torch.func.functional_call(model, w, (ids[None],)), ids[None])

    return list(torch.vmap(torch.func.grad(one), (None, 0))(weights, IDS).values())


def keyword(model):
    return [
        model.head(input=torch.ones(2, WIDTH)) * 1,
        model.head(torch.ones(WIDTH)) * 1,
        model.head(torch.ones(0, WIDTH)) * 1,
    ]


# -- losses ------------------------------------------------------------------------------------------------------------


def losses(model):
    logits, flat = model(IDS), IDS[:, 1:].clone()
    flat[0, :2] = 4
    cut = logits[:, :-1].flatten(0, 1)
    return with_gradients(
        model,
        F.cross_entropy(cut, flat.flatten(), ignore_index=4),
        F.cross_entropy(cut, flat.flatten(), ignore_index=4, label_smoothing=0.2, reduction="sum") / 7,
        F.cross_entropy(input=cut, target=flat.flatten()),
        F.cross_entropy(cut.div(2, rounding_mode=None) * 3, flat.flatten()),
        F.cross_entropy(torch.tanh(cut / -2.0) * -2.0, flat.flatten()),
        F.cross_entropy(torch.mul(cut, 0.5), flat.flatten(), reduction="none")[2:].sum(),
        F.cross_entropy(cut, flat.flatten().clamp(max=3), weight=torch.arange(VOCAB).float()),
        F.nll_loss(cut.log_softmax(-1), flat.flatten()),
    )


def all_ignored(model):
    logits = model(IDS).flatten(0, 1)
    return [F.cross_entropy(logits, torch.full((15,), -100)), F.cross_entropy(logits[:0], IDS[:0].flatten())]


def indexed(model):
    logits = model(IDS)
    rows = torch.tensor([True, False, True])
    return [logits[rows], logits[torch.tensor([1])], logits[..., -1, :], logits[True], logits[None], logits[:, -1:, :],
            logits.view(torch.int32), logits.view(-1), logits[-1, 2], logits.to(torch.int64).float()]  # fmt: skip


def selected(model):
    rows = model(IDS).flatten(0, 1)
    places = torch.tensor([0, 7, 7, 14])
    loss = F.cross_entropy(rows.index_select(0, places), IDS.flatten()[places], reduction="none")
    return [
        *with_gradients(model, (loss * torch.arange(4)).sum()),
        rows.index_select(1, places[:2]),
        torch.index_select(rows, 0, places),
    ]


USES = [
    selected,
    seen_by_a_hook, changed_by_a_hook, backward_hook, global_hook, hook_on_logits, retained_gradient,
    base_after_its_view, read_after_a_step, other_weights, assigned, retied, loaded, resized, parametrized,
    frozen, converted, copied, no_grad, inference, autocast, gradients_by_transform, a_sample_each, keyword,
    losses, all_ignored, indexed,
]  # fmt: skip


def assert_as_plain(use, **options):
    torch.manual_seed(0)
    plain = Model(**options)
    swapped = copy.deepcopy(plain)
    assert swap(swapped).replaced
    for got, want in zip(*(list(use(model)) for model in (swapped, plain)), strict=True):
        assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad)
        got, want = (t.form() if isinstance(t, Logits) else t for t in (got, want))
        close = 2e-2 if torch.bfloat16 in (want.dtype,) or use is autocast else 1e-5
        torch.testing.assert_close(got, want, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["", "bias", "tied"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_as_plain(use, options):
    assert_as_plain(use, **options)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_into_logits_is_kept(write):
    assert_as_plain(written(write))


def test_logits_too_large_to_keep_say_that_weights_have_changed(monkeypatch):
    from cai_kernels.swap import head

    monkeypatch.setattr(head, "SMALL", 0)
    model = Model()
    swap(model)
    logits = model(IDS)
    step(model, loss_of(logits))
    with pytest.raises(KernelError, match="after the weights of the output layer have changed"):
        logits.argmax(-1)


def test_a_penalty_on_gradients_through_the_loss_raises():
    model = Model()
    swap(model)
    loss = loss_of(model(IDS))
    first = torch.autograd.grad(loss, model.mix.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        (loss + first.square().sum()).backward()


class Shown(nn.Parameter):
    """A parameter that operators treat as any other."""


class Watched(nn.Parameter):
    """A parameter whose operators go through a function of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "waits"), [(Shown, True), (Watched, False)])
def test_logits_wait_where_operators_treat_the_weight_as_any_parameter(kind, waits):
    plain = Model()
    model = copy.deepcopy(plain)
    model.head.weight.__class__ = kind
    model.head.weight.requires_grad_(False)
    plain.head.weight.requires_grad_(False)
    swap(model, kinds=("loss",))
    assert isinstance(model.train()(IDS), Logits) == waits
    losses = [with_gradients(either, loss_of(either(IDS))) for either in (model, plain)]
    torch.testing.assert_close(*losses)
