"""`swap(kinds=["attention"])` finds who calls torch's attention, and sets an order of operators there only."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint

from cai_kernels import KernelError, swap
from cai_kernels.swap import attention as swapped_attention

WIDTH, HEADS = 16, 2
TORCHS = list(swapped_attention.TORCHS)
OURS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
INSIDE = [3, 1, 2, 0, 4]


class Attention(nn.Module):
    """Remembers the order of operators at each call."""

    def __init__(self):
        super().__init__()
        self.qkv, self.orders = nn.Linear(WIDTH, 3 * WIDTH), []

    def split(self, x):
        if not torch.compiler.is_compiling():
            self.orders.append(torch._C._get_sdp_priority_order())
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class ByName(Attention):
    def forward(self, x):
        return attend(*self.split(x)).transpose(1, 2).flatten(2)


class ByPath(Attention):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2)


class ByMethod(Attention):
    def mix(self, parts):
        return helper(*parts)

    def forward(self, x):
        return self.mix(self.split(x)).transpose(1, 2).flatten(2)


class ByAttribute(Attention):
    def __init__(self):
        super().__init__()
        self.mix = attend

    def forward(self, x):
        return self.mix(*self.split(x)).transpose(1, 2).flatten(2)


class BySuper(Attention):
    def forward(self, x):
        return super().forward(x) + x


def helper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def eager(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


TABLE = {"torch": helper, "plain": eager}


class ByTable(Attention):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return TABLE[self.kind](*self.split(x)).transpose(1, 2).flatten(2)


class Plain(Attention):
    def forward(self, x):
        return eager(*self.split(x)).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, recompute: bool = False):
        super().__init__()
        self.norm, self.attention, self.recompute = nn.LayerNorm(WIDTH), Attention(), recompute

    def forward(self, x):
        if self.recompute:
            return x + checkpoint(self.attention, self.norm(x), use_reentrant=False)
        return x + self.attention(self.norm(x))


@pytest.fixture(autouse=True)
def untouched():
    """Torch's own order: on a Hopper GPU torch itself puts cuDNN first once it has run there."""
    before = order_now()
    torch._C._set_sdp_priority_order(TORCHS)
    yield
    torch._C._set_sdp_priority_order(before)


@pytest.fixture
def preferred(monkeypatch):
    """Our order, on the CPU."""
    monkeypatch.setattr(swapped_attention, "wanted_order", lambda device: OURS)


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def order_now() -> list[int]:
    return torch._C._get_sdp_priority_order()


def build(*args, of=Block):
    torch.manual_seed(3)
    return nn.Sequential(of(*args), of(*args))


def swap_order(model):
    return swap(model, kinds=["attention"])


def gradients(run, model):
    model.zero_grad()
    run(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_torchs_order_is_what_it_was():
    """The constant that tells an order of somebody else's from torch's own, in a process that ran no attention yet."""
    code = "import torch; print(list(torch._C._get_sdp_priority_order()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(TORCHS)


@pytest.mark.parametrize("of", [Attention, ByName, ByPath, ByMethod, ByAttribute, BySuper])
def test_who_calls_it_is_found(of, preferred):
    model = build(of=of)
    expected = model(X)
    record = swap_order(model)
    assert [(r.name, r.kind) for r in record.replaced] == [("0", "attention"), ("1", "attention")]
    assert "attention by torch, fastest first" in str(record) and "2 modules, the first '0'" in str(record)
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    assert [m.orders for m in model] == [[TORCHS, INSIDE]] * 2
    assert order_now() == TORCHS


def test_who_does_not_is_left():
    model = nn.Sequential(Plain(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), ByTable("plain"))
    record = swap_order(model)
    assert not record.replaced and not record.kept
    assert [r.name for r in swap_order(nn.Sequential(Block(), ByTable("torch"))).replaced] == [
        "0.attention",
        "1",
    ]


def test_torchs_own_modules_are_found():
    record = swap_order(nn.Transformer(WIDTH, 2, 1, 1, 32))
    assert {r.name.rpartition(".")[2] for r in record.replaced} == {"self_attn", "multihead_attn"}


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    llama = {"hidden_size": WIDTH, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    gpt2 = {"n_embd": WIDTH, "n_head": 2, "n_layer": 2}
    for config, name in (
        (transformers.LlamaConfig(vocab_size=9, **llama), "model.layers.{}.self_attn"),
        (transformers.GPT2Config(vocab_size=9, **gpt2), "transformer.h.{}.attn"),
    ):
        for kind, found in (("sdpa", [name.format(i) for i in range(2)]), ("eager", [])):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kind)
            record = swap(model)
            assert [r.name for r in record.replaced if r.kind == "attention"] == found
            record.undo()
            assert not any("forward" in m.__dict__ for m in model.modules())


def test_undo_and_what_was_replaced_before():
    model = build()
    record = swap_order(model)
    again = swap_order(model)
    assert not again.replaced
    assert {k.reason for k in again.kept} == {"its forward was replaced before"}
    record.undo()
    assert not any("forward" in m.__dict__ for m in model.modules())
    wrapped = swap_order(model)
    kept = model[1].attention.forward
    model[1].attention.forward = lambda x: kept(x)
    with pytest.raises(KernelError, match=r"'1.attention' has been replaced since"):
        wrapped.undo()


def test_the_reference_and_other_devices_keep_torchs_order():
    model = build()
    assert not swap(model, kinds=["attention"], backend="reference").replaced
    swap_order(model)
    model(X)
    assert model[0].attention.orders == [TORCHS]


def test_only_while_it_trains(preferred):
    model = build()
    swap_order(model)
    model.eval()(X)
    assert model[0].attention.orders == [TORCHS]


def test_an_error_inside_gives_the_order_back(preferred):
    model = build()
    swap_order(model)
    with pytest.raises(RuntimeError):
        model[0].attention(X[..., :3])
    assert model[0].attention.orders == [INSIDE] and order_now() == TORCHS


def test_somebodys_choice_wins(preferred):
    model, seen = build(), []
    swap_order(model)
    model[0].attention.qkv.register_forward_hook(
        lambda *_: seen.append({b.name for b in torch.nn.attention._cur_sdpa_kernel_backends()})
    )
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        theirs = order_now()
        model(X)
        assert order_now() == theirs
    with sdpa_kernel(SDPBackend.MATH):
        model(X)
    assert model[0].attention.orders == [theirs, INSIDE]
    assert seen == [{"MATH", "EFFICIENT_ATTENTION"}, {"MATH"}]
    assert order_now() == TORCHS


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_run_again_sees_it(preferred, reentrant):
    model = build()
    swap_order(model)
    first = model[0].attention
    checkpoint(first, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert first.orders == [INSIDE, INSIDE] and order_now() == TORCHS


def test_copies_run_on_their_own(preferred):
    model = build()
    swap_order(model)
    other = copy.deepcopy(model)
    other(X)
    assert other[0].attention.orders == [INSIDE] and not model[0].attention.orders
    assert other[0].attention.forward.__self__ is other[0].attention
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(X), model(X))


@pytest.mark.parametrize("recompute", [False, True])
def test_it_compiles_in_one_graph(monkeypatch, recompute):
    """With the operator that comes first: torch's plain form, which only our order takes."""
    monkeypatch.setattr(swapped_attention, "wanted_order", lambda device: [SDPBackend.MATH])
    model, twin = build(recompute), build(recompute)
    swap_order(model)
    seen = []

    def backend(graph, inputs):
        from torch._functorch.aot_autograd import aot_module_simplified
        from torch._functorch.compilers import nop

        def forward(traced, args):
            seen.append({str(node.target) for node in traced.graph.nodes})
            return nop(traced, args)

        return aot_module_simplified(graph, inputs, fw_compiler=forward, bw_compiler=nop)

    got = gradients(torch.compile(model, fullgraph=True, backend=backend), model)
    for gradient, expected in zip(got, gradients(twin, twin), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert len(seen) == 1 and not any("flash" in target for target in seen[0])
    assert order_now() == TORCHS


@pytest.mark.parametrize("restricted", [False, True])
def test_a_graph_switches_nothing_on(preferred, restricted):
    model, asked = build(), []
    swap_order(model)

    def backend(graph, inputs):
        asked.extend(
            n.args[0] for n in graph.graph.nodes if n.target is torch.nn.attention._backend_from_string
        )
        return graph.forward

    only = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    with only if restricted else contextlib.nullcontext():
        torch.compile(model, fullgraph=True, backend=backend)(X)
    assert asked[:2] == ([] if restricted else ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
    assert order_now() == TORCHS
