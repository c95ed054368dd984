"""Loops that hook, name or replace parameters in ways of their own."""

from __future__ import annotations

import torch
from loops.cases import REFUSED, case, clip_all, started, steps
from torch import nn

from cai_mesh.gradients import backward_asks_inputs


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
def backward_to_some_parameters_every_second_time(run):
    for number, batch in enumerate(run.batches(4)):
        given = {"inputs": [run.model.layers[1].up.weight]} if number % 2 else {}
        run.loss(batch).backward(**given)
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_activations_and_then_to_all(run):
    given = []
    handle = run.model.layers[1].register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for batch in run.batches(2):
        given.clear()
        loss = run.loss(batch)
        given[0].retain_grad()
        loss.backward(inputs=given, retain_graph=True)
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    handle.remove()


@case
def a_forward_with_gradients_after_the_backward(run):
    """Of loops that log the loss after the update, without no_grad, and of steps on kept gradients."""
    for batch in run.batches(3):
        run.loss(batch).backward()
        run.loss(batch)
        run.optimizer.step()
        run.loss(batch)
        run.optimizer.zero_grad()


@case
def a_step_before_any_backward(run):
    """Of schedulers that want one."""
    run.optimizer.step()
    run.optimizer.zero_grad()
    steps(run, count=2)


@case
def a_backward_that_is_left_out(run):
    """A loss that is too large is not learned from; the step is taken all the same."""
    for number, batch in enumerate(run.batches(3)):
        loss = run.loss(batch)
        if number != 1:
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


@case
def backward_to_all_parameters_by_name(run):
    for batch in run.batches(2):
        run.loss(batch).backward(inputs=list(run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_parameters_beside_another(run):
    """Of GANs with a penalty of its own backward (StyleGAN's R1), on the discriminator alone."""
    batches = list(run.batches(6))
    for batch, other in zip(batches[::2], batches[1::2], strict=True):
        run.loss(batch).backward(inputs=list(run.model.parameters()))
        run.loss(other).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_one_weight_beside_another(run):
    for batch in run.batches(3):
        run.loss(batch).backward()
        run.loss(batch).backward(inputs=run.model.layers[0].up.weight)
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def backward_to_parameters_by_autograd_of_a_loss_with_decay(run):
    """The loss reads weights itself; their graph ends at what the loop has, the forward's at what it computes with."""
    for batch in run.batches(3):
        decay = sum(p.pow(2).sum() for p in run.model.parameters())
        inputs = dict(run.model.head.named_parameters())
        torch.autograd.backward([run.loss(batch) + 0.01 * decay], inputs=list(inputs.values()))
        run.see(sum(p.grad is not None for p in run.model.parameters()))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def a_block_that_is_left_out_at_random(run):
    """Stochastic depth: its forward is run and gives back what it was given."""
    block = run.model.layers[0]
    handle = block.register_forward_hook(lambda module, args, output: args[0])
    for batch in run.batches(2):
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    handle.remove()
    steps(run, count=1)


PASSED_OVER = {
    "backward_to_some_parameters_every_second_time": "steps without any gradient, though the model has been run",
    "backward_to_activations": "steps without any gradient",
    "backward_to_parameters_listed_before": "steps without any gradient",
    "a_backward_that_is_left_out": "steps without any gradient",
    "backward_to_some_parameters": "",
    "backward_to_the_first_parameters": "",
    "backward_to_all_parameters_by_name": "",
}
"""Right where torch asks the inputs of a backward what they stand for; refused with an older one."""
if not backward_asks_inputs():
    REFUSED |= {
        (name, stage): says or ("steps without" if stage == "offload" else "has reached some parameters")
        for name, says in PASSED_OVER.items()
        for stage in ("zero3", "offload", "residency")
    }


@case
def moments_forgotten(run):
    """Of loops that restart the optimizer with a new phase."""
    steps(run, count=2)
    run.optimizer.state.clear()
    steps(run, count=2)


@case
def moments_scaled(run):
    def scale(run):
        for p in run.model.parameters():
            run.optimizer.state[p]["exp_avg"].mul_(0.5)

    steps(run, after_step=scale)


@case
def moments_of_one_forgotten(run):
    """Of loops that give an embedding new rows or a head new weights (lottery tickets, ReDo)."""
    steps(run, count=2)
    for p in run.model.head.parameters():
        run.optimizer.state.pop(p, None)
    steps(run, count=2)


REFUSED |= {
    (name, stage): "the state of an optimizer of an offloaded model was taken away"
    for name in ("moments_forgotten", "moments_of_one_forgotten")
    for stage in ("offload", "residency")
}
