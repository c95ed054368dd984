"""Forwards without gradients through a pipeline's runner, and what is said of their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.compose.workload import Batch, Loss, Score, Workload, own_part
from cai_pipeline import PipelineRunner
from cai_zero import last_unsharded


def scores(
    runner: PipelineRunner,
    workload: Workload,
    loss: Loss,
    batches: Sequence[Batch],
    score: Score,
) -> list[Tensor]:
    """Return what a function says of the output of a runner's model for each microbatch. Collective.

    Args:
        runner: the runner, whose model is in evaluation mode from then on.
        workload: the model's workload.
        loss: the loss, which knows how outputs are cut over ranks.
        batches: any number of microbatches, alike on the pp, cp and tp ranks of a data rank.
        score: a function of the loss, the model's output and the target.

    Returns nothing on ranks without the last stage.
    """
    values: list[Tensor] = []

    def note(output: Any, target: Any) -> Tensor:
        values.append(score(loss, output, target))
        return torch.zeros(())

    runner.model.eval()
    with torch.no_grad():
        ready = [own_part(workload, runner.mesh, workload.ready(batch)) for batch in batches]
    inputs: list[Mapping[str, Any]] = [workload.inputs(batch) for batch in ready]
    with workload.running(), logits_waiting(runner.model):
        runner.evaluate(inputs, [workload.target(batch) for batch in ready], loss_fn=note)
    return values


@contextmanager
def logits_waiting(model: nn.Module) -> Iterator[None]:
    """Let a model that is evaluated form its logits a chunk at a time after the forward, where kernels take its loss.

    Its output layer returns logits that wait for what is asked of them only in training mode (`cai_kernels.swap`).
    Weights of stage 3 that the forward used last stay for that.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is None:
        yield
        return
    head.train()
    try:
        with last_unsharded(model):
            yield
    finally:
        head.eval()
