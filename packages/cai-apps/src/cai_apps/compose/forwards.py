"""Forwards without gradients through a pipeline's runner, and what is said of their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.compose.workload import Batch, Loss, Score, Workload
from cai_pipeline import PipelineRunner


def scores(
    runner: PipelineRunner,
    workload: Workload,
    loss: Loss,
    batches: Sequence[Batch],
    score: Score,
    *,
    logits_wait: bool,
) -> list[Tensor]:
    """Return what a function says of the output of a runner's model for each microbatch. Collective.

    Args:
        runner: the runner, whose model is in evaluation mode from then on.
        workload: what a batch means to the model.
        loss: the loss, which knows how outputs are cut over ranks.
        batches: any number of microbatches, alike on the pp, cp and tp ranks of a data rank.
        score: a function of the loss, the model's output and the target.
        logits_wait: whether kernels may form logits after the forward, a chunk at a time: the weights of the output
            layer are still there then, which those of stage 3 are not.

    Returns nothing on ranks without the last stage.
    """
    values: list[Tensor] = []

    def note(output: Any, target: Any) -> Tensor:
        values.append(score(loss, output, target))
        return torch.zeros(())

    runner.model.eval()
    if logits_wait:
        _let_logits_wait(runner.model)
    with torch.no_grad():
        ready = [workload.ready(batch) for batch in batches]
    inputs: list[Mapping[str, Any]] = [workload.inputs(batch) for batch in ready]
    with workload.running():
        runner.evaluate(inputs, [workload.target(batch) for batch in ready], loss_fn=note)
    return values


def _let_logits_wait(model: nn.Module) -> None:
    """Let a model that is evaluated form its logits a chunk at a time, where kernels take its loss.

    Its output layer returns logits that wait for what is asked of them only in training mode (`cai_kernels.swap`).
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is not None:
        head.train()
