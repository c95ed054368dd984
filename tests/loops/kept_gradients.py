"""Loops in which gradients outlive a step: torch keeps them until somebody clears them."""

from __future__ import annotations

import torch
from loops.cases import REFUSED, case, clip_all, gradients, steps
from torch import nn


@case
def stepped_twice(run):
    for batch in run.batches(3):
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def cleared_every_second_step(run):
    for at, batch in enumerate(run.batches(5)):
        run.loss(batch).backward()
        run.optimizer.step()
        if at % 2:
            run.optimizer.zero_grad()


@case
def cleared_every_second_step_and_clipped(run):
    """What clipping has scaled is what the next backward is added to."""
    for at, batch in enumerate(run.batches(5)):
        run.loss(batch).backward()
        clip_all(run)
        run.optimizer.step()
        if at % 2:
            run.model.zero_grad()


@case
def never_cleared(run):
    for at, batch in enumerate(run.batches(4)):
        run.loss(batch, skip=1 if at % 2 else None).backward()
        run.optimizer.step()


@case
def gradients_fade(run):
    """Instead of being cleared: momentum in `.grad`."""
    for batch in run.batches(4):
        run.loss(batch).backward()
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad.mul_(0.5)


@case
def gradients_seen_after_the_step(run):
    """As loggers do that are called once a step (torch's `Module.zero_grad` comes after)."""

    def look(run):
        for p in run.model.parameters():
            run.see(p.grad.norm())
        run.optimizer.zero_grad()

    for batch in run.batches(3):
        run.loss(batch).backward()
        run.optimizer.step()
        look(run)


@case
def counted_after_the_step(run):
    for batch in run.batches(3):
        run.loss(batch, skip=1).backward()
        run.optimizer.step()
        run.see(len(gradients(run)))
        run.see(sum(p.grad.numel() for p in run.model.parameters() if p.grad is not None) > 0)
        run.optimizer.zero_grad()


@case
def clipped_after_the_step(run):
    for batch in run.batches(3):
        run.loss(batch).backward()
        run.optimizer.step()
        clip_all(run)
        run.optimizer.zero_grad()


@case
def stepped_between_two_backwards(run):
    for at in range(3):
        run.loss(run.batch(2 * at)).backward()
        run.optimizer.step()
        run.loss(run.batch(2 * at + 1)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def zeros_for_a_block_left_out(run):
    """`zero_grad(set_to_none=False)` leaves gradients of zero: AdamW decays by them and its moments fade."""
    for at, batch in enumerate(run.batches(5)):
        run.loss(batch, skip=1 if at % 2 else None).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


@case
def zeros_by_the_model_for_a_block_left_out(run):
    for at, batch in enumerate(run.batches(5)):
        run.model.zero_grad(set_to_none=False)
        run.loss(batch, skip=1 if at % 2 else None).backward()
        clip_all(run)
        run.optimizer.step()


@case
def zeros_by_hand_for_a_block_left_out(run):
    for at, batch in enumerate(run.batches(5)):
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        run.loss(batch, skip=1 if at % 2 else None).backward()
        run.optimizer.step()


@case
def zeros_and_a_step_without_a_backward(run):
    for batch in run.batches(3):
        run.loss(batch, skip=2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.see(len(gradients(run)))
        run.see(sum(g.abs().sum() for g in gradients(run)))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def zeros_before_any_backward(run):
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()
    run.see(len(gradients(run)))
    steps(run, count=2)


@case
def zeros_of_what_is_not_reduced_yet(run):
    for at, batch in enumerate(run.batches(4)):
        run.loss(batch, skip=1 if at else None).backward()
        if at == 1:
            run.optimizer.zero_grad(set_to_none=False)
            continue
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=at != 0)


@case
def a_loss_scale_that_overflows_and_nobody_clears(run):
    """What has overflowed stays, and so does what is added to it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for at, batch in enumerate(run.batches(5)):
        bad = at == 1 and run.rank == 0
        scaler.scale(run.loss(batch) * (float("inf") if bad else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.see(scaler.get_scale())
        if at % 2 == 0:
            run.optimizer.zero_grad()


@case
def gradients_of_some_are_cleared(run):
    for batch in run.batches(4):
        run.loss(batch).backward()
        run.optimizer.step()
        for name, p in run.model.named_parameters():
            if not name.startswith("head"):
                p.grad = None


@case
def the_last_gradients_once_more(run):
    """Extrapolation: a step with the last gradients before the next are made (Popov's method)."""
    for batch in run.batches(4):
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.loss(batch).backward()
        run.optimizer.step()


@case
def a_copy_of_gradients_after_the_step(run):
    last = None
    for batch in run.batches(4):
        run.loss(batch).backward()
        if last is not None:
            run.see(sum((g * old).sum() for g, old in zip(gradients(run), last, strict=True)))
        run.optimizer.step()
        last = [g.clone() for g in gradients(run)]
        run.optimizer.zero_grad()


@case
def penalised_by_weights_and_seen(run):
    for batch in run.batches(3):
        (run.loss(batch) + 1e-2 * sum(p.abs().sum() for p in run.model.parameters())).backward()
        run.optimizer.step()
        run.see(nn.utils.get_total_norm(gradients(run)))
        run.model.zero_grad(set_to_none=False)


GIVEN_BACK = "the gradients of a step were given back with it"
REFUSED |= {
    (name, stage): GIVEN_BACK
    for stage in ("offload", "residency")
    for name in (
        "stepped_twice",
        "cleared_every_second_step",
        "cleared_every_second_step_and_clipped",
        "never_cleared",
        "gradients_fade",
        "gradients_seen_after_the_step",
        "clipped_after_the_step",
        "stepped_between_two_backwards",
        "a_loss_scale_that_overflows_and_nobody_clears",
        "gradients_of_some_are_cleared",
        "the_last_gradients_once_more",
        "a_copy_of_gradients_after_the_step",
        "penalised_by_weights_and_seen",
    )
}
