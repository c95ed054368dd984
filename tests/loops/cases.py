"""Loops as people write them, by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable

import torch
from loops.kit import Loop, Run, Start
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_mesh.gradients import clip_grad_norm_
from cai_zero import Ema, no_sync, shard_optimizer

CASES: dict[str, Loop] = {}


def case(loop: Loop) -> Loop:
    CASES[loop.__name__] = loop
    return loop


def started(**start) -> Callable[[Loop], Loop]:
    """A case with something before it: see `Start`."""

    def wrap(loop: Loop) -> Loop:
        loop.start = Start(**start)
        return case(loop)

    return wrap


def steps(
    run: Run, before_step=lambda run: None, after_step=lambda run: None, count: int = 4, **options
) -> None:
    for batch in run.batches(count):
        run.loss(batch, **options).backward()
        before_step(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        after_step(run)


def gradients(run: Run) -> list[torch.Tensor]:
    return [p.grad for p in run.model.parameters() if p.grad is not None]


# -- clipping ----------------------------------------------------------------------------------------------------


@case
def plain_steps(run):
    steps(run)


@case
def torchs_clip(run):
    steps(run, lambda run: run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))


@case
def torchs_clip_of_a_list(run):
    steps(
        run, lambda run: run.see(nn.utils.clip_grad_norm_(list(run.model.parameters()), 0.05, foreach=True))
    )


@case
def torchs_clip_by_the_largest(run):
    steps(
        run,
        lambda run: run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, norm_type=float("inf"))),
    )


@case
def torchs_clip_by_the_sum(run):
    steps(run, lambda run: run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.3, norm_type=1)))


@case
def torchs_clip_by_value(run):
    steps(run, lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 0.002))


@case
def torchs_total_norm(run):
    steps(run, lambda run: run.see(nn.utils.get_total_norm([p.grad for p in run.model.parameters()])))


@case
def total_norm_then_clip(run):
    def clip(run):
        total = nn.utils.get_total_norm(gradients(run))
        nn.utils.clip_grads_with_norm_(run.model.parameters(), 0.05, total)
        run.see(total)

    steps(run, clip)


@case
def clip_the_optimizers_parameters(run):
    def clip(run):
        held = [p for group in run.optimizer.param_groups for p in group["params"]]
        run.see(nn.utils.clip_grad_norm_(held, 0.05))

    steps(run, clip)


@case
def clip_of_some_parameters(run):
    steps(run, lambda run: run.see(nn.utils.clip_grad_norm_(run.model.layers.parameters(), 0.02)))


@case
def cais_clip_with_the_mesh(run):
    steps(run, lambda run: run.see(clip_grad_norm_(run.model.parameters(), 0.05, run.mesh)))


@case
def cais_clip_of_the_model(run):
    steps(run, lambda run: run.see(clip_grad_norm_(run.model, 0.05, run.mesh)))


@case
def norm_by_hand(run):
    def clip(run):
        total = torch.sqrt(sum(g.pow(2).sum() for g in gradients(run)))
        run.see(total)
        for grad in gradients(run):
            grad.mul_(0.05 / total)

    steps(run, clip)


@case
def norms_one_by_one(run):
    def look(run):
        for grad in gradients(run):
            run.see(grad.norm())
            run.see(grad.data.norm(2))
            run.see(torch.linalg.vector_norm(grad))

    steps(run, look, count=2)


# -- reading and writing gradients -----------------------------------------------------------------------------


@case
def scale_gradients(run):
    def scale(run):
        for p in run.model.parameters():
            p.grad.mul_(0.5)

    steps(run, scale)


@case
def divide_gradients(run):
    def divide(run):
        for p in run.model.parameters():
            p.grad /= 3

    steps(run, divide)


@case
def divide_gradients_data(run):
    def divide(run):
        for p in run.model.parameters():
            p.grad.data.div_(3)

    steps(run, divide)


@case
def foreach_scale(run):
    steps(run, lambda run: torch._foreach_mul_(gradients(run), 0.25))


@case
def replace_gradients(run):
    def replace(run):
        for p in run.model.parameters():
            p.grad = p.grad * 2 + 0.01 * p.grad.sign()

    steps(run, replace)


@case
def zeros_for_gradients(run):
    def replace(run):
        run.model.head.weight.grad = torch.zeros_like(run.model.head.weight)

    steps(run, replace)


@case
def drop_one_gradient(run):
    def drop(run):
        run.model.layers[1].up.weight.grad = None

    steps(run, drop)


@case
def delete_one_gradient(run):
    def drop(run):
        del run.model.layers[1].norm.weight.grad

    steps(run, drop)


@case
def drop_a_batch_by_the_model(run):
    for at, batch in enumerate(run.batches(4)):
        run.loss(batch).backward()
        if at == 1:
            run.model.zero_grad()
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def drop_a_batch_by_the_optimizer(run):
    for at, batch in enumerate(run.batches(4)):
        run.loss(batch).backward()
        if at != 1:
            run.optimizer.step()
        run.optimizer.zero_grad()


@case
def the_model_clears_gradients(run):
    for batch in run.batches(4):
        run.model.zero_grad()
        run.loss(batch).backward()
        run.optimizer.step()


@case
def gradients_are_zeroed_in_place(run):
    for batch in run.batches(4):
        run.model.zero_grad(set_to_none=False)
        run.loss(batch).backward()
        run.optimizer.step()


@case
def the_optimizer_zeroes_in_place(run):
    for batch in run.batches(4):
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


@case
def gradients_set_to_none_by_hand(run):
    for batch in run.batches(4):
        run.loss(batch).backward()
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad = None


@case
def are_gradients_finite(run):
    def look(run):
        run.see(all(bool(torch.isfinite(g).all()) for g in gradients(run)))
        run.see(max(float(g.abs().max()) for g in gradients(run)))
        run.see(min(float(g.min()) for g in gradients(run)))

    steps(run, look, count=2)


@case
def no_gradient_before_a_backward(run):
    run.see(sum(p.grad is not None for p in run.model.parameters()))
    steps(run)
    run.see(sum(p.grad is not None for p in run.model.parameters()))


@case
def how_many_have_gradients(run):
    steps(run, lambda run: run.see(len(gradients(run))))


@case
def gradients_read_as_a_whole(run):
    def look(run):
        run.see(torch.cat([g.flatten() for g in gradients(run)]).mean())

    steps(run, look, count=2)


@case
def gradients_centred(run):
    def centre(run):
        for p in run.model.parameters():
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    steps(run, centre)


@case
def one_row_without_gradient(run):
    def pad(run):
        run.model.embed.weight.grad.index_fill_(0, torch.tensor([3]), 0.0)
        run.model.head.weight.grad[2] = 0

    steps(run, pad)


@case
def masked_gradients(run):
    def mask(run):
        for p in run.model.parameters():
            p.grad.masked_fill_(p.grad.abs() < 1e-3, 0.0)

    steps(run, mask)


@case
def gradients_of_a_shape(run):
    def noise(run):
        for p in run.model.parameters():
            p.grad.add_(torch.full(p.shape, 0.001, dtype=p.dtype))

    steps(run, noise)


@case
def gradients_kept_aside(run):
    """Those of the last step, added again with a weight."""
    last: dict[str, torch.Tensor] = {}

    def momentum(run):
        for name, p in run.model.named_parameters():
            if name in last:
                p.grad.add_(last[name], alpha=0.3)
            last[name] = p.grad.clone()

    steps(run, momentum)


@case
def a_view_that_is_kept(run):
    """Read and written after the gradient has been changed under it."""

    def write(run):
        row = run.model.embed.weight.grad.view(-1)
        run.model.embed.weight.grad.mul_(2.0)
        run.see(row.sum())
        row.mul_(0.5)

    steps(run, write)


@case
def a_norm_after_a_gradient_is_dropped(run):
    def clip(run):
        run.see(run.model.head.weight.grad.sum())  # complete by now
        run.model.head.weight.grad = None
        if run.stage in ("zero0", "zero1", "zero2", "offload"):
            run.see(run.optimizer.clip_grad_norm_(0.05))
        else:
            run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))

    steps(run, clip)


@case
def not_a_number_on_one_rank(run):
    """In the first row of the table, which one rank keeps; extremes and norms are NaN on all."""
    for batch in run.batches(1):
        run.loss(batch).backward()
        run.model.embed.weight.grad.masked_fill_(run.model.embed.weight.grad.abs() >= 0.0, float("nan"))
        run.model.scale.grad.fill_(float("nan"))
        for p in (run.model.embed.weight, run.model.scale):
            run.see(torch.isnan(p.grad.max()))
            run.see(torch.isnan(p.grad.min()))
            run.see(torch.isnan(p.grad.norm(float("inf"))))
        run.optimizer.zero_grad()


# -- accumulating --------------------------------------------------------------------------------------------------


@case
def two_backwards(run):
    for at in range(3):
        for part in (0, 1):
            (run.loss(run.batch(2 * at + part)) / 2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def two_backwards_clipped(run):
    for at in range(3):
        for part in (0, 1):
            (run.loss(run.batch(2 * at + part)) / 2).backward()
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def clipped_after_each_backward(run):
    for at in range(3):
        for part in (0, 1):
            (run.loss(run.batch(2 * at + part)) / 2).backward()
            run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


def silent(run: Run):
    if run.stage.startswith("zero"):
        return no_sync(run.model if run.stage == "zero3" else run.optimizer)
    return contextlib.nullcontext()


@case
def accumulated_without_talk(run):
    for at in range(3):
        with silent(run):
            (run.loss(run.batch(2 * at)) / 2).backward()
        (run.loss(run.batch(2 * at + 1)) / 2).backward()
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def only_accumulated_without_talk(run):
    for at in range(3):
        with silent(run):
            run.loss(run.batch(at)).backward()
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def dropped_while_accumulating(run):
    for at in range(3):
        with silent(run):
            (run.loss(run.batch(2 * at)) / 2).backward()
        if at == 1:
            run.model.zero_grad()
        (run.loss(run.batch(2 * at + 1)) / 2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# -- what else a backward may be ---------------------------------------------------------------------------------


@case
def l2_over_all_parameters(run):
    for batch in run.batches(4):
        loss = run.loss(batch) + 1e-2 * sum(p.pow(2).sum() for p in run.model.parameters())
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def gradient_penalty(run):
    """On the gradient of the logits with respect to what the blocks are given (Gulrajani et al., arXiv:1704.00028)."""
    given = []
    handle = run.model.layers[0].register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for batch in run.batches(3):
        given.clear()
        logits = run.model(batch[0])
        (grad,) = torch.autograd.grad(logits.sum(), given[0], create_graph=True)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        (loss + grad.square().mean()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    handle.remove()


@case
def gradients_of_inputs(run):
    """Looked at between steps, as saliency maps do."""
    given = []
    handle = run.model.layers[0].register_forward_pre_hook(lambda module, args: given.append(args[0]))

    def look(run):
        given.clear()
        torch.autograd.grad(run.model(run.batch(5)[0]).sum(), given[0])

    steps(run, after_step=look)
    handle.remove()


@case
def gradients_by_autograd(run):
    for batch in run.batches(3):
        held = list(run.model.parameters())
        for p, grad in zip(held, torch.autograd.grad(run.loss(batch), held), strict=True):
            p.grad = grad
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def hooks_on_parameters(run):
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in run.model.layers[0].parameters()]
    steps(run)
    for handle in handles:
        handle.remove()


@case
def hooks_after_accumulation(run):
    def clamp(param):
        param.grad.mul_(0.5)

    for p in run.model.layers[1].parameters():
        p.register_post_accumulate_grad_hook(clamp)
    steps(run)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("broken")


def raise_in_backward(run: Run) -> None:
    handle = run.model.layers[0].register_forward_hook(lambda module, args, out: Broken.apply(out))
    with contextlib.suppress(ValueError):
        run.loss(run.batch(7)).backward()
    handle.remove()


@case
def a_backward_that_raises(run):
    steps(run, count=2)
    raise_in_backward(run)
    run.optimizer.zero_grad()
    steps(run, count=2)


@case
def a_backward_that_raises_and_nobody_clears(run):
    """What had arrived before the error stays in `.grad` until the loop clears it."""
    raise_in_backward(run)
    run.model.zero_grad()
    steps(run, count=2)


@case
def a_forward_without_backward(run):
    for batch in run.batches(3):
        run.loss(batch)
        with torch.no_grad():
            run.see(run.loss(batch) * 0 + 1)
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def a_loss_scale(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for batch in run.batches(4):
        scaler.scale(run.loss(batch)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.see(scaler.get_scale())


@case
def a_loss_scale_and_clipping(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in run.batches(4):
        scaler.scale(run.loss(batch)).backward()
        scaler.unscale_(run.optimizer)
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


@case
def a_loss_scale_that_overflows(run):
    """On one rank only, whose share holds the bad row."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for at, batch in enumerate(run.batches(4)):
        loss = run.loss(batch)
        bad = at == 1 and run.rank == 0
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.see(scaler.get_scale())


# -- which parameters train --------------------------------------------------------------------------------------


@case
def a_block_left_out_in_some_steps(run):
    for at, batch in enumerate(run.batches(5)):
        run.loss(batch, skip=1 if at % 2 else None).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def a_block_left_out_and_clipped(run):
    for at, batch in enumerate(run.batches(5)):
        run.loss(batch, skip=1 if at % 2 else None).backward()
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def a_block_never_used(run):
    steps(run, skip=2)


@case
def freeze_on_the_way(run):
    steps(run, count=2)
    run.model.layers[0].requires_grad_(False)
    steps(run, count=2)


@case
def unfreeze_on_the_way(run):
    run.model.layers[0].requires_grad_(False)
    steps(run, count=2)
    run.model.layers[0].requires_grad_(True)
    steps(run, count=2)


@case
def freeze_for_a_while(run):
    steps(run, count=1)
    run.model.embed.weight.requires_grad_(False)
    steps(run, count=2)
    run.model.embed.weight.requires_grad_(True)
    steps(run, count=1)


def clip_all(run):
    run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))


def frozen(*names):
    """Freezes parameters whose names begin so."""

    def freeze(model):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(names))

    return freeze


@started(before=frozen("embed", "scale"))
def frozen_around_the_blocks(run):
    steps(run, clip_all)


@started(before=frozen("embed", "layers.0"))
def frozen_at_first_and_trained_later(run):
    steps(run, clip_all, count=2)
    run.model.requires_grad_(True)
    steps(run, clip_all, count=3)


@started(before=frozen("layers.1.up", "layers.1.norm.bias", "scale"))
def a_part_of_a_block_frozen_at_first(run):
    steps(run, clip_all, count=2)
    run.model.layers[1].requires_grad_(True)
    steps(run, clip_all, count=2)
    run.model.scale.requires_grad_(True)
    steps(run, clip_all, count=2)


@started(before=frozen("embed", "layers", "scale"))
def unfrozen_layer_by_layer(run):
    for layer in (*reversed(run.model.layers), run.model.embed):
        steps(run, clip_all, count=2)
        layer.requires_grad_(True)
    steps(run, clip_all, count=2)


@started(before=frozen("layers.0", "embed"))
def frozen_at_first_trained_and_frozen_again(run):
    steps(run, count=1)
    run.model.layers[0].requires_grad_(True)
    steps(run, count=2)
    run.model.layers[0].requires_grad_(False)
    run.model.embed.requires_grad_(True)
    steps(run, count=2)


@started(before=frozen("layers.0"))
def unfrozen_between_backward_and_step(run):
    steps(run, lambda run: run.model.layers[0].requires_grad_(True), count=3)


@started(before=frozen("layers.0"))
def unfrozen_after_clipping(run):
    def clip_and_unfreeze(run):
        clip_all(run)
        run.model.layers[0].requires_grad_(True)
        run.see(nn.utils.get_total_norm(gradients(run)))

    steps(run, clip_and_unfreeze, count=3)


@started(before=frozen("layers.0", "head.bias"))
def unfrozen_while_accumulating(run):
    for step in range(2):
        for i in range(2):
            run.loss(run.batch(2 * step + i)).backward()
            run.model.requires_grad_(True)
        clip_all(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


@started(before=frozen("layers.0"))
def unfrozen_with_a_loss_scale(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, batch in enumerate(run.batches(4)):
        run.model.layers[0].requires_grad_(step > 1)
        scaler.scale(run.loss(batch)).backward()
        scaler.unscale_(run.optimizer)
        clip_all(run)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


@started(before=frozen("layers.0"))
def unfrozen_with_an_average(run):
    if run.stage == "plain":
        average = torch.optim.swa_utils.AveragedModel(
            run.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        average.update_parameters(run.model)
        update = functools.partial(average.update_parameters, run.model)
    else:
        average = Ema(run.model, run.optimizer, decay=0.5)
        update = average.update
    for batch in range(4):
        run.model.layers[0].requires_grad_(batch > 1)
        run.loss(run.batch(batch)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        update()
    if run.stage == "plain":
        averaged = Run(average.module, None)
        run.see(averaged.loss(run.batch_of_all(7)).detach())
    else:
        with average.applied():
            run.see(run.loss(run.batch_of_all(7)).detach())


def of_the_head(model):
    return model.head.parameters()


@started(given=of_the_head)
def two_optimizers(run):
    """One of the head, another of all else, each sharded where the model's parameters are not."""
    second = torch.optim.SGD(others(run.model), lr=0.05, momentum=0.9)
    if run.stage in ("zero0", "zero1", "zero2"):
        second = shard_optimizer(second, run.mesh, model=run.model, stage=int(run.stage[-1]))

    def after(run):
        second.step()
        second.zero_grad()

    steps(run, clip_all, after)


@started(given=of_the_head)
def two_optimizers_in_turns(run):
    second = torch.optim.SGD(others(run.model), lr=0.05)
    if run.stage in ("zero0", "zero1", "zero2"):
        second = shard_optimizer(second, run.mesh, model=run.model, stage=int(run.stage[-1]))
    for step, batch in enumerate(run.batches(5)):
        run.loss(batch).backward()
        clip_all(run)
        (second if step % 2 else run.optimizer).step()
        run.model.zero_grad()


def others(model):
    """All parameters that are not of the head."""
    return [param for name, param in model.named_parameters() if not name.startswith("head")]


@started(before=frozen("embed", "layers", "scale"), given=of_the_head)
def a_group_added_on_the_way(run):
    steps(run, clip_all, count=2)
    run.model.requires_grad_(True)
    run.optimizer.add_param_group({"params": others(run.model), "lr": 0.005, "weight_decay": 0.0})
    steps(run, clip_all, count=3)


@started(before=frozen("embed", "layers", "scale"), given=of_the_head)
def a_frozen_group_added_and_trained_later(run):
    run.optimizer.add_param_group({"params": others(run.model), "lr": 0.005})
    steps(run, clip_all, count=2)
    run.model.requires_grad_(True)
    steps(run, clip_all, count=3)


@started(given=of_the_head)
def groups_added_one_by_one(run):
    for layer in reversed(run.model.layers):
        steps(run, count=2)
        run.model.zero_grad()
        run.optimizer.add_param_group({"params": layer.parameters()})
    steps(run, count=2)


@started(given=of_the_head)
def a_group_added_with_a_schedule(run):
    steps(run, count=1)
    run.model.zero_grad()
    run.optimizer.add_param_group({"params": others(run.model), "lr": 0.01})
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, [lambda n: 1.0, lambda n: 0.5**n])
    steps(run, clip_all, lambda run: schedule.step(), count=3)


@started(given=of_the_head)
def clipped_with_parameters_that_are_not_stepped(run):
    def after(run):
        run.model.zero_grad()

    steps(run, clip_all, after, count=3)


@started(given=of_the_head)
def parameters_that_are_not_stepped_accumulate(run):
    steps(run, clip_all, count=3)
    run.see(sum(p.grad.square().sum() for p in others(run.model)))


@started(given=of_the_head)
def parameters_that_are_not_stepped_join_with_gradients(run):
    steps(run, count=2)
    run.optimizer.add_param_group({"params": others(run.model)})
    run.optimizer.step()
    run.optimizer.zero_grad()
    steps(run, clip_all, count=2)


# -- weights -------------------------------------------------------------------------------------------------------


@case
def weights_clamped_after_each_step(run):
    def clamp(run):
        for p in run.model.parameters():
            p.data.clamp_(-0.3, 0.3)

    steps(run, after_step=clamp)


@case
def weights_clamped_without_grad(run):
    def clamp(run):
        with torch.no_grad():
            for p in run.model.parameters():
                p.clamp_(-0.3, 0.3)

    steps(run, after_step=clamp)


def of_groups(run):
    return [p for group in run.optimizer.param_groups for p in group["params"]]


@case
def weights_decayed_through_the_groups(run):
    def decay(run):
        for p in of_groups(run):
            p.data.mul_(0.97)

    steps(run, after_step=decay)


@case
def weights_clamped_through_the_groups(run):
    def clamp(run):
        with torch.no_grad():
            for p in of_groups(run):
                p.clamp_(-0.25, 0.25)

    steps(run, after_step=clamp)


@case
def weights_scaled_through_the_groups(run):
    def scale(run):
        with torch.no_grad():
            torch._foreach_mul_(of_groups(run), 0.95)
            for p in of_groups(run):
                p.view(-1)[:].add_(0.01)

    steps(run, after_step=scale)


@case
def looking_ahead(run):
    slow = [p.detach().clone() for p in of_groups(run)]
    for step, batch in enumerate(run.batches(5)):
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            for p, s in zip(of_groups(run), slow, strict=True) if step % 2 else ():
                s.add_(p - s, alpha=0.5)
                p.copy_(s)


@case
def written_after_a_forward_without_backward(run):
    for batch in run.batches(3):
        run.loss(batch)
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(0.9)
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def data_written_after_a_forward_without_backward(run):
    for batch in run.batches(3):
        run.loss(batch)
        for p in run.model.parameters():
            p.data.mul_(0.9)
        run.loss(batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def blocks_trained_in_turns(run):
    for step, batch in enumerate(run.batches(6)):
        for i, layer in enumerate(run.model.layers):
            layer.requires_grad_(step % 3 == i)
        run.loss(batch).backward()
        clip_all(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def hooks_on_the_optimizer(run):
    run.optimizer.register_step_pre_hook(lambda *_: run.see(1))
    run.optimizer.register_step_post_hook(lambda *_: run.see(2))
    steps(run)


@started(given=of_the_head)
def a_group_added_and_all_state_there_and_back(run):
    steps(run, count=2)
    run.model.zero_grad()
    run.optimizer.add_param_group({"params": others(run.model), "lr": 0.003})
    steps(run, count=2)
    kept = copy.deepcopy([run.optimizer.state_dict(), run.model.state_dict()])
    steps(run, count=2)
    run.optimizer.load_state_dict(kept[0])
    run.model.load_state_dict(kept[1])
    steps(run, count=2)


@case
def a_schedule(run):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 4)
    steps(run, after_step=lambda run: schedule.step())


@case
def evaluated_between_steps(run):
    def evaluate(run):
        run.model.eval()
        with torch.no_grad():
            run.loss(run.batch(9))
        run.model.train()

    steps(run, after_step=evaluate)


@case
def an_average_by_hand(run):
    average = {n: p.detach().clone() for n, p in run.model.named_parameters()}

    def update(run):
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                average[name].lerp_(p, 0.1)

    steps(run, after_step=update)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(average[name])
    if run.stage in ("zero0", "zero1", "zero2"):
        run.optimizer.zero_grad()


@case
def an_average_by_torch(run):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    steps(run, after_step=lambda run: average.update_parameters(run.model))
    with torch.no_grad():
        for p, mean in zip(run.model.parameters(), average.module.parameters(), strict=True):
            p.copy_(mean)


@case
def an_average_that_is_sharded(run):
    ema = Ema(run.model, run.optimizer, decay=0.8)
    steps(run, after_step=lambda run: ema.update())
    with ema.applied(), torch.no_grad():
        ids, labels = run.batch_of_all(9)
        run.see(nn.functional.cross_entropy(run.model(ids).flatten(0, 1), labels.flatten()))
    steps(run, count=2)
    with torch.no_grad():
        run.see(nn.functional.cross_entropy(run.model(ids).flatten(0, 1), labels.flatten()))


@case
def a_pickle_of_the_parameters(run):
    steps(run, count=1)
    kept = pickle.loads(pickle.dumps(dict(run.model.named_parameters())))
    for name, param in run.model.named_parameters():
        run.see(torch.equal(kept[name].detach(), param.detach()))
        run.see(type(kept[name]) is nn.Parameter)
    steps(run, count=1)


@case
def a_copy_of_the_model(run):
    steps(run, count=2)
    teacher = copy.deepcopy(run.model)
    ids, _ = run.batch(0)
    with torch.no_grad():
        run.see(abs(teacher(ids) - run.model(ids)).max())
    steps(run, count=2)


@case
def state_there_and_back(run):
    steps(run, count=2)
    kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    steps(run, count=1)
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    steps(run, count=2)


# -- loops of other projects ---------------------------------------------------------------------------------------


@case
def a_state_dict_in_a_file_of_each_rank(run):
    steps(run, count=2)
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.save(run.model.state_dict(), file)
    flat = run.stage in ("zero3", "residency")
    assert any("nowhere else" in str(each.message) for each in told) == flat
    steps(run, count=1)
    file.seek(0)
    run.model.load_state_dict(torch.load(file))
    steps(run, count=2)


@case
def steps_by_hand(run):
    """As in torch's first tutorials."""
    for batch in run.batches(3):
        run.model.zero_grad()
        run.loss(batch).backward()
        with torch.no_grad():
            for p in run.model.parameters():
                p.sub_(p.grad, alpha=0.1)
    run.model.zero_grad()


@case
def steps_by_hand_on_data(run):
    for batch in run.batches(3):
        run.loss(batch).backward()
        for p in run.model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
        run.model.zero_grad()


@case
def the_loop_of_nanogpt(run):
    """Microbatches, a scaler that may be off, a rate set by hand, clipping, gradients cleared to None."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        for micro in range(2):
            loss = run.loss(run.batch(2 * step + micro)) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad(set_to_none=True)


@case
def towards_flat_minima(run):
    """SAM (Foret et al., arXiv:2010.01412), as it is usually written."""
    for batch in run.batches(3):
        run.loss(batch).backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in run.model.parameters()]), p=2)
        run.see(norm)
        with torch.no_grad():
            moves = [0.05 / (norm + 1e-12) * p.grad for p in run.model.parameters()]
            for p, move in zip(run.model.parameters(), moves, strict=True):
                p.add_(move)
        run.model.zero_grad()
        run.loss(batch).backward()
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                p.sub_(move)
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def two_losses_of_one_forward(run):
    for batch in run.batches(3):
        logits = run.model(batch[0]).flatten(0, 1)
        nn.functional.cross_entropy(logits, batch[1].flatten()).backward(retain_graph=True)
        logits.square().mean().backward()
        run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def gradients_added_by_hand(run):
    """Of two tasks, each cleared before the other, then put together."""
    for step in range(3):
        run.loss(run.batch(2 * step)).backward()
        first = [p.grad.clone() for p in run.model.parameters()]
        run.optimizer.zero_grad()
        run.loss(run.batch(2 * step + 1)).backward()
        for p, grad in zip(run.model.parameters(), first, strict=True):
            p.grad = p.grad + 0.5 * grad
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def noise_by_the_size_of_gradients(run):
    def noise(run):
        for p in run.model.parameters():
            run.see(p.grad.mean())
            p.grad.mul_(1.0 + p.grad.abs().mean())

    steps(run, noise, count=2)


@case
def blocks_that_run_again_in_backward(run):
    """torch.utils.checkpoint, both kinds."""
    for kind, layer in zip((True, False, False), run.model.layers, strict=True):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=kind)
    steps(run, lambda run: run.see(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))


@case
def a_batch_with_a_bad_loss_is_left_out(run):
    for at, batch in enumerate(run.batches(4)):
        loss = run.loss(batch) * (float("nan") if at == 1 else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        if torch.isfinite(norm):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.see(torch.isfinite(norm))


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSED = {
    ("gradient_penalty", "zero3"): "second derivatives were asked for",
    ("gradient_penalty", "residency"): "second derivatives were asked for",
    ("gradients_by_autograd", "residency"): "torch.autograd.grad was asked for",
    ("an_average_by_torch", "residency"): "cannot be copied",
    ("a_copy_of_the_model", "residency"): "cannot be copied",
    ("gradient_penalty", "offload"): "second derivatives were asked for",
    ("gradients_by_autograd", "zero3"): "torch.autograd.grad was asked for",
    ("gradients_by_autograd", "offload"): "torch.autograd.grad was asked for",
    ("an_average_by_torch", "zero3"): "cannot be copied",
    ("an_average_by_torch", "offload"): "cannot be copied",
    ("a_copy_of_the_model", "zero3"): "cannot be copied",
    ("a_copy_of_the_model", "offload"): "cannot be copied",
}
"""(case, stage), and what the error says. All else is right."""
