"""Rows over ranks: losses and all gradients are those of one plain process that has whole rows."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cai_mesh.attention import masked_attention
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import cut_batch, parallelize_context
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.documents import DocumentCut, cut_of
from cai_tensor_parallel.context.pieces import attend_pieces

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
HEAD = {"head_dim": 8}
KINDS = {
    "llama": SMALL,
    "llama, one head of keys": SMALL | {"num_key_value_heads": 1},
    "qwen3": SMALL | HEAD,
    "mistral": SMALL | HEAD | {"sliding_window": 5},
    "gemma2": SMALL | HEAD | {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": SMALL | HEAD | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": SMALL | HEAD | {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SMALL
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
    }
    | {"v_head_dim": 8, "head_dim": 4, "first_k_dense_replace": 2},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Types of transformers, and sizes of a small model: windows, a soft cap, layers of two kinds, learned positions,
sinks, values of fewer features than keys."""
BATCHES = ("rows", "documents", "padding")
LENGTH = 21
"""Tokens of a row, which divide over no number of ranks."""
LENGTHS = ((21,), (7, 9, 5), (2, 19))


def model_of(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind.partition(",")[0], **KINDS[kind], attn_implementation="eager")
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(param)
    return model


def batch_of(name: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (3, LENGTH), generator=random)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if name == "documents":
        starts = [[0, *torch.tensor(row).cumsum(0).tolist()] for row in LENGTHS]
        batch["cu_seqlens"] = torch.tensor([[*row, *[LENGTH] * (4 - len(row))] for row in starts]).int()
        for row, places in enumerate(starts):
            batch["labels"][row, places[:-1]] = -100
    if name == "padding":
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[21], [13], [4]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


@functools.cache
def twin(kind: str, name: str):
    """Loss and gradients of whole rows; each document alone, as nobody else has to keep them apart."""
    model, batch = model_of(kind), batch_of(name)
    total = int((batch["labels"][:, 1:] != -100).sum())
    loss = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS if name == "documents" else [(LENGTH,)] * 3):
        first = 0
        for length in lengths:
            part = slice(first, first + length)
            ids, labels = (batch[key][row : row + 1, part] for key in ("input_ids", "labels"))
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = loss + F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            first += length
    (loss / total).backward()
    return float(loss / total), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def over_ranks(kind: str, name: str, mode: str, world: int):
    """Loss and gradients of all ranks together."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = parallelize_context(model_of(kind), mesh, mode=mode)
    whole = batch_of(name)
    batch = cut_batch(whole, mesh)
    labels = batch.pop("shift_labels")
    logits = model(**batch, use_cache=False).logits.flatten(0, 1)
    total = int((whole["labels"][:, 1:] != -100).sum())
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100) / total
    loss.backward()
    loss = loss.detach()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for tensor in (loss, *gradients.values()):
        dist.all_reduce(tensor)
    return float(loss), gradients


def over_ranks_each(cases, world: int):
    return {(mode, *case): over_ranks(*case, mode, world) for mode in MODES for case in cases}


MODES = ("gather", "ulysses", "ring")
FEWER = [(kind, "documents") for kind in KINDS] + [("llama", "rows"), ("gemma2", "padding")]


@pytest.mark.parametrize("cases", [FEWER, pytest.param(None, marks=pytest.mark.matrix)], ids=["some", "all"])
@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(world, cases):
    cases = cases or [(kind, name) for kind in KINDS for name in BATCHES]
    results = run_ranks(world, over_ranks_each, cases, world, timeout=600)[0]
    for (mode, *case), (got, found) in results.items():
        loss, gradients = twin(*case)
        assert got == pytest.approx(loss, rel=1e-9 if case[0] == "gpt2" else 1e-6), (mode, case)
        assert set(found) == set(gradients)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for key, gradient in gradients.items():
            assert torch.allclose(found[key], gradient, rtol=0, atol=1e-6 * largest), (mode, case, key)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_cut_is_undone(ranks):
    rows = torch.arange(2 * 12 * ranks).view(2, 12 * ranks)
    parts = [Cut(ranks, index).own(rows, 1) for index in range(ranks)]
    cut = Cut(ranks, 0)
    assert torch.equal(cut.in_order(torch.cat(parts, 1), 1), rows)
    assert torch.equal(cut.by_rank(rows, 1), torch.cat(parts, 1))
    places = [Cut(ranks, index).places(12 * ranks, torch.device("cpu")) for index in range(ranks)]
    assert len({int(own.sum()) for own in places}) == 1, "every rank attends to as many keys"


def drawn_starts(rows: int, length: int, documents: int, random: torch.Generator) -> torch.Tensor:
    """Rows of documents of any lengths, some of them empty, the last ones all in the end."""
    cuts = torch.randint(0, length + 1, (rows, documents - 1), generator=random).sort(1).values
    cuts[:, -documents // 3 :] = length
    return torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=length).int()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_document_is_cut_and_ranks_have_as_many_tokens(ranks):
    random = torch.Generator().manual_seed(ranks)
    for documents in (1, 2, 5, 24):
        length = 10 * ranks
        starts = drawn_starts(3, length, documents, random)
        cuts = [DocumentCut(Cut(ranks, index), starts, length) for index in range(ranks)]
        places = torch.cat([cut.places(length, starts.device) for cut in cuts], 1)
        assert torch.equal(places.sort(1).values, torch.arange(length).expand(3, length)), "each token once"
        rows = torch.randn(3, 2, length, 4, generator=random)
        parts = torch.cat([cut.own(rows, 2) for cut in cuts], 2)
        assert torch.equal(cuts[0].by_rank(rows, 2), parts)
        assert torch.equal(cuts[0].in_order(parts, 2), rows)
        piece = length // ranks // 2
        for cut in cuts:
            for place, number in enumerate(cut.row_cut.pieces):
                own = cut.places(length, starts.device)[:, place * piece : (place + 1) * piece]
                for row, (begins, queries, keys) in enumerate(
                    zip(
                        starts.tolist(),
                        cut.piece_starts(number).tolist(),
                        cut.key_starts(number).tolist(),
                        strict=True,
                    )
                ):
                    assert (queries[-1], keys[-1]) == (piece, (number + 1) * piece)
                    for document, first in enumerate(begins[:-1]):
                        seen = keys[document + 1] - keys[document]
                        asked = queries[document + 1] - queries[document]
                        expected = list(range(first + seen - asked, first + seen))
                        assert own[row, queries[document] : queries[document + 1]].tolist() == expected
    one = DocumentCut(Cut(ranks, 0), torch.tensor([[0, length]]), length)
    assert torch.equal(one.places(length, starts.device), Cut(ranks, 0).places(length, starts.device))


def test_ranks_attend_to_as_many_keys_whatever_documents_are():
    """Documents up to a quarter of a row: the rank with most has at most 5 % more than the mean."""
    random = torch.Generator().manual_seed(0)
    for ranks, length in ((2, 16384), (4, 32768), (8, 65536)):
        sizes = torch.randint(16, length // 4, (400,), generator=random).tolist()
        ends = torch.tensor(sizes).cumsum(0)
        starts = torch.nn.functional.pad(ends[ends < length], (1, 1))[None]
        starts[0, -1] = length
        within = (
            torch.arange(length)
            - starts[0][torch.searchsorted(starts[0], torch.arange(length), right=True) - 1]
        )
        areas = torch.stack(
            [
                within[DocumentCut(Cut(ranks, index), starts, length).places(length, starts.device)[0]].sum()
                for index in range(ranks)
            ]
        ).double()
        assert float(areas.max() / areas.mean()) < 1.001


def test_one_rank_has_rows_as_they_are():
    rows, starts = torch.arange(24).view(2, 12), torch.tensor([[0, 5, 12], [0, 12, 12]]).int()
    cut = cut_of(Cut(1, 0), starts, 12)
    assert torch.equal(cut.own(rows, 1), rows) and torch.equal(cut.in_order(rows, 1), rows)


def test_gradients_of_what_is_taken_are_those_of_torch():
    random = torch.Generator().manual_seed(0)
    starts = drawn_starts(2, 24, 4, random)
    cut = DocumentCut(Cut(3, 1), starts, 24)
    rows = torch.randn(2, 2, 24, 4, dtype=torch.float64, generator=random, requires_grad=True)
    for taken in (
        lambda rows: cut.in_order(rows, 2),
        lambda rows: cut.by_rank(rows, 2),
        lambda rows: cut.keys_seen(rows, 1),
        lambda rows: cut.keys_seen(rows, 4),
    ):
        assert torch.autograd.gradcheck(taken, (rows,))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_attend_as_whole_rows(causal, window, documents):
    """Ranks in turn, in this process: queries that see what comes after them, too."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2))
    starts = torch.tensor([[0, 5, 17, 24], [0, 24, 24, 24]]).int() if documents else None
    call = AttentionCall(scale=0.3, causal=causal, window=window, cu_seqlens=starts)
    whole = masked_attention(query, key, value, call)
    for index in range(3):
        row_cut = Cut(3, index)
        cut = cut_of(row_cut, starts, 24)
        keys, values = cut.by_rank(key, 2), cut.by_rank(value, 2)
        part = attend_pieces(row_cut, masked_attention, cut.own(query, 2), keys, values, call)
        assert torch.allclose(part, cut.own(whole, 2), rtol=0, atol=1e-12)


def refused(case: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    if case == "jamba":
        sizes = SMALL | {
            "mamba_d_state": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        }
        parallelize_context(AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **sizes)), mesh)
    if case == "roberta":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = AutoConfig.for_model("roberta", **sizes, vocab_size=61, is_decoder=True)
        parallelize_context(AutoModelForCausalLM.from_config(config), mesh)
    if case == "llama4_text":
        config = AutoConfig.for_model("llama4_text", **SMALL, **HEAD, attention_chunk_size=8)
        parallelize_context(AutoModelForCausalLM.from_config(config), mesh)
    if case == "heads":
        config = AutoConfig.for_model(
            "llama", **(SMALL | {"num_attention_heads": 3, "hidden_size": 48, "num_key_value_heads": 3})
        )
        parallelize_context(AutoModelForCausalLM.from_config(config), mesh, mode="ulysses")
    if case == "mode":
        parallelize_context(model_of("llama"), mesh, mode="spiral")
    if case == "bloom":
        config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=61)
        parallelize_context(AutoModelForCausalLM.from_config(config), mesh)
    model, batch = parallelize_context(model_of("llama"), mesh), cut_batch(batch_of("rows"), mesh)
    if case == "positions":
        model(input_ids=batch["input_ids"])
    if case == "labels":
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], labels=batch["shift_labels"])
    if case == "routers":
        batch |= {"labels": batch["shift_labels"], "output_router_logits": True}
        model(**batch)
    if case == "mask":
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -1] = 0
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask)
    if case == "pairs":
        cut_batch({"input_ids": torch.zeros(1, 4), "attention_mask": torch.zeros(1, 1, 4, 4)}, mesh)
    if case == "unknown":
        cut_batch(batch_of("rows") | {"pixel_values": torch.zeros(3, 4)}, mesh)


REFUSALS = {
    "jamba": "looks along a row",
    "roberta": "positions that it counts",
    "llama4_text": "chunks",
    "heads": "3 heads over 2 ranks",
    "mode": "unknown mode",
    "bloom": "cannot be exchanged",
    "positions": "without position_ids",
    "labels": "shift_labels",
    "routers": "loss of routers",
    "mask": "takes no mask",
    "pairs": "pairs of tokens",
    "unknown": "pixel_values",
}


def loss_of_transformers():
    """The loss of a model of transformers itself, of labels and what follows them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = parallelize_context(model_of("llama"), mesh)
    whole = batch_of("documents")
    batch = cut_batch(whole, mesh)
    total = int((whole["labels"][:, 1:] != -100).sum())
    loss = model(**batch, labels=batch["shift_labels"], num_items_in_batch=total, use_cache=False).loss
    dist.all_reduce(loss.detach())
    return float(loss)


def errors_and_loss():
    """In one start of ranks: what each case raises, and that loss."""
    errors = {}
    for case in REFUSALS:
        try:
            refused(case)
        except PlanError as error:
            errors[case] = str(error)
    return errors, loss_of_transformers()


@pytest.fixture(scope="module")
def others():
    return run_ranks(2, errors_and_loss, timeout=120)[0]


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused(case, others):
    assert REFUSALS[case] in others[0][case]


def test_a_model_of_transformers_computes_its_loss(others):
    assert others[1] == pytest.approx(twin("llama", "documents")[0], rel=1e-6)
