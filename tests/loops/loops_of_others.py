"""Loops that hook, name or replace parameters in ways of their own."""

from __future__ import annotations

from loops.cases import case, clip_all, started, steps
from torch import nn


def tripled(param):
    param.grad.mul_(3.0)


def halved(model):
    """Hooks from before anything else: of LoRA tools, gradient scalers, loggers."""
    model.cai_handles = [p.register_hook(lambda grad: grad * 0.5) for p in model.layers[0].parameters()]
    model.layers[1].up.weight.register_post_accumulate_grad_hook(tripled)
    model.head.bias.tag = "last"


@started(before=halved)
def hooks_from_before(run):
    steps(run, clip_all, count=2)
    for handle in run.model.cai_handles:
        handle.remove()
    steps(run, clip_all, count=2)


def one_row_masked(model):
    def mask(grad):
        grad = grad.clone()
        grad[0] = 0
        return grad

    model.embed.weight.register_hook(mask)


@started(before=one_row_masked)
def a_row_masked_by_a_hook_from_before(run):
    """As the padding or the old words of an extended vocabulary are kept."""
    steps(run)


@started(before=halved)
def attributes_from_before(run):
    steps(run, count=1)
    run.see(sum(getattr(p, "tag", "") == "last" for p in run.model.parameters()))


@case
def backward_to_some_parameters(run):
    for batch in run.batches(3):
        run.loss(batch).backward(inputs=list(run.model.head.parameters()))
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_some_parameters_and_to_all(run):
    for batch in run.batches(3):
        loss = run.loss(batch)
        loss.backward(inputs=[run.model.layers[1].up.weight], retain_graph=True)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_activations(run):
    given = []
    handle = run.model.layers[1].register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for batch in run.batches(2):
        given.clear()
        loss = run.loss(batch)
        given[0].retain_grad()
        loss.backward(inputs=given)
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    handle.remove()


@case
def weights_loaded_after_the_step(run):
    """Straight after it, while new parameters may still be on their way."""
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    steps(run, count=2)
    run.model.load_state_dict(kept)
    steps(run, count=2)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


@case
def backward_to_the_first_parameters(run):
    """Through all blocks, none of which is to get a gradient."""
    for batch in run.batches(3):
        run.loss(batch).backward(inputs=list(run.model.embed.parameters()))
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_parameters_listed_before(run):
    held = list(run.model.embed.parameters())
    for batch in run.batches(3):
        run.loss(batch).backward(inputs=held)
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()
