"""A model, its weights and the runner of its schedule on one mesh: what the loop drives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.average import Average
from cai_apps.compose.broken import watched
from cai_apps.compose.forwards import logits_waiting, scores
from cai_apps.compose.routing.balance import Balance
from cai_apps.compose.step_loss import Evaluation, StepLoss
from cai_apps.compose.weights import MODEL, Weights
from cai_apps.compose.workload import Batch, Score, Workload, own_part
from cai_apps.config.sections import RunConfig
from cai_mesh import rng
from cai_mesh.comm import ParallelMesh, all_reduce, coordinate, group
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_pipeline import PipelineRunner
from cai_tensor_parallel import whole_rows
from cai_zero import LossScale, SampleClip

LOSS_SCALE = "loss_scale"
"""Key of the loss scale in a checkpoint."""


@dataclass
class Session:
    """A step is `step` (forward and backward of every microbatch), `norm` and `update`.

    Gradients are those of the loss summed over the global batch and divided by `total`, so that layouts and masks
    change nothing. Only `find_broken`, an `update` whose optimizer does not look at the norm itself, and `state` with
    float16 wait for the device.
    """

    config: RunConfig
    mesh: DeviceMesh
    model: nn.Module
    weights: Weights
    runner: PipelineRunner
    workload: Workload
    loss: StepLoss
    scale: LossScale | None = None
    """The scale of the loss, with float16."""
    average: Average | None = None
    """The average of the weights, where the config asks for one."""
    samples: SampleClip | None = None
    """Clips each sample's gradient, where the config asks for it and a step has several."""
    balance: Balance | None = None
    """The routers of a mixture of experts."""
    measures: Tensor | None = None
    """What the loss of the last step has measured, of this data rank, on every rank of its pipeline: numerators and
    denominators, float64 [2, names]; None where the workload measures nothing."""
    steps: int = 0
    """Steps taken; with the seed and the rank's place, the key of torch's own random numbers (dropout)."""

    def step(self, microbatches: Sequence[Batch], *, total: Tensor | float) -> Tensor:
        """Run forward and backward of this data rank's microbatches.

        Args:
            microbatches: as many as the schedule runs; alike on the pp, cp and tp ranks of a data rank.
            total: the divisor of the summed loss, of the whole global batch (its target tokens, its images).

        Returns this data rank's part of the loss, a float64 scalar, on every rank.
        """
        tensor_axes = ParallelMesh.of(self.mesh).leaves("tp")
        differing = {a: i for a, i in coordinate(self.mesh).items() if a not in tensor_axes}
        rng.seed_torch(self.config.train.seed, self.steps, differing)
        microbatches = self.workload.before_step(self, microbatches)
        self.model.train()
        if self.balance is not None:
            self.balance.start_step()
        with (
            self.workload.running(),
            self._clipping(total),
            self.loss.measuring(self.runner.device) as measures,
        ):
            loss = self._unscaled(self.runner.step(*self._split(microbatches, total)))
        self.measures = self._on_all_stages(measures)
        return self._of_whole_rows(loss)

    def _on_all_stages(self, values: Tensor | None) -> Tensor | None:
        """Return what last stages have added up of a data rank's rows, in place, on all its ranks."""
        if values is not None:
            all_reduce(values, group(self.mesh, ("pp",))).wait()
        return None if values is None else self._of_whole_rows(values)

    def _of_whole_rows(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that have rows together, in place."""
        all_reduce(values, group(self.mesh, ("cp",))).wait()
        return values

    def routing(self) -> dict[str, Tensor]:
        """Return what the last step says of routers, by name, scalars on the device; nothing without. Collective."""
        return {} if self.balance is None else self.balance.numbers()

    def scores(self, microbatches: Sequence[Batch], score: Score) -> list[Tensor]:
        """Return what a function says of each microbatch, in evaluation mode; on the last stage alone. Collective."""
        return scores(self.runner, self.workload, self.loss.loss, microbatches, score)

    def trained_weights(self) -> dict[str, BoxedTensor]:
        """Return what is trained, in master precision, by name; more where there are no masters apart."""
        masters = self.weights.masters()
        return BoxedTensor.of_model(self.model) if masters is None else masters

    def norm(self) -> Tensor:
        """Return the norm of the step's gradients over the whole model, before clipping: a scalar. Collective."""
        if self.scale is not None:
            self.weights.finish()
            self.scale.unscale_(self.weights.optimizer)
        return self.weights.norm(self.clip)

    @property
    def clip(self) -> float:
        """The norm that a step's gradients do not exceed: of its only sample too."""
        options = self.config.optimizer
        alone = self.samples is None and options.clip_samples is not None
        return min(options.clip, options.clip_samples) if alone else options.clip  # type: ignore[type-var]

    def _clipping(self, total: Tensor | float) -> AbstractContextManager[None]:
        if self.samples is None:
            return nullcontext()
        most = self.config.optimizer.clip_samples
        assert most is not None
        return self.samples.step(most / total)

    @property
    def skips(self) -> bool:
        """Whether `update` leaves out a step whose norm is not finite."""
        return self.scale is not None

    def update(self, lr: float, norm: Tensor | float) -> None:
        """Clip gradients of this norm, step at `lr` times the scale of each group, drop the gradients.

        A norm that is not finite: with float16 the step is left out. Without, a number says that the caller has seen
        it, and the step is taken, as torch takes it; for a tensor, which the caller is to look at later, it is left out
        (the average then takes the old weights in once more). A tensor need not keep the host waiting.
        """
        for param_group in self.weights.optimizer.param_groups:
            param_group["lr"] = lr * param_group.get("lr_scale", 1.0)
        if self.skips and not math.isfinite(norm):
            self.weights.drop()
        else:
            self.weights.step(norm, self.clip)
            if self.average is not None:
                self.average.update(self.steps + 1)
            if self.balance is not None:
                self.balance.update_bias(norm)
        if self.scale is not None:
            self.scale.update()
        self.steps += 1

    def evaluate(self, microbatches: Sequence[Batch], *, total: Tensor | float) -> Evaluation:
        """Return the loss of `step`, forward only, in evaluation mode, and how many targets are predicted right."""
        microbatches, device = self.workload.before_step(self, microbatches), self.runner.device
        self.model.eval()
        waits = self.workload.chooses_places
        with (
            self.workload.running(),
            logits_waiting(self.model) if waits else nullcontext(),
            self.loss.counting(device) as right,
            self.loss.measuring(device) as sums,
        ):
            loss = self._unscaled(self.runner.evaluate(*self._split(microbatches, total)))
        loss = self._of_whole_rows(loss)
        return Evaluation(loss, self._on_all_stages(right), self._on_all_stages(sums))

    @torch.no_grad()
    def predict(self, microbatch: Batch) -> Tensor:
        """Return the likeliest class at each place of a microbatch, int64, alike on the ranks of a pipeline.

        Args:
            microbatch: one of the size of those that are trained on, alike on all ranks. Collective.
        """
        assert self.workload.predicted is not None
        self.model.eval()
        ready = own_part(self.workload, self.mesh, self.workload.ready(microbatch))
        with self.workload.running():
            output = self.runner.forward(self.workload.inputs(ready))
        if output is None:
            target = self.workload.target(ready)
            predicted = torch.zeros_like(target["labels"] if isinstance(target, Mapping) else target)
        else:
            predicted = self.workload.predicted(self.loss.loss, output)
        all_reduce(predicted, group(self.mesh, ("pp",))).wait()
        return whole_rows(predicted, self.mesh, ready.get("cu_seqlens"))

    def _unscaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else self.scale.unscaled(loss)

    def find_broken(self, microbatches: Sequence[Batch], *, total: Tensor | float) -> str | None:
        """Where NaN or infinity come from on this rank when these microbatches are a step; None: not from here.

        The first module whose output is not finite when the batch is run forward; else the last parameter whose
        gradient is not, where backward meets it first. Collective. Gradients are lost.
        """
        with watched(self.model) as first:
            self.evaluate(microbatches, total=1.0)
        origins: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(origins, f"the output of {first[0]}" if first else None)
        if any(origins):
            return origins[dist.get_rank()]
        self.weights.drop()
        self.step(microbatches, total=total)
        self.weights.finish()
        named = [canonical_name(name, param) for name, param in self.model.named_parameters()]
        broken = {name for name, grad in self.weights.gradients() if not bool(torch.isfinite(grad).all())}
        return next((f"the gradient of {name}" for name in reversed(named) if name in broken), None)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the session: `model.NAME` in master precision, `optimizer.NAME.SLOT`.

        Frozen weights of a base (`Workload.has_base`) are left out: they are read again.

        Tensors are views of the session's own memory; load into them, then call `loaded` with the rest.
        """
        scale = {} if self.scale is None else {LOSS_SCALE: self.scale.state_dict()}
        average = {} if self.average is None else self.average.state()
        unchanged = self._unchanged() if self.workload.has_base else set()
        state = {name: value for name, value in self.weights.state().items() if name not in unchanged}
        return state | self.biases() | scale | average

    def biases(self) -> dict[str, Any]:
        """Return the biases of routers that steps move, by their names in a checkpoint: views."""
        return {} if self.balance is None else self.balance.state(self.model, MODEL)

    def _unchanged(self) -> set[str]:
        """Return what a checkpoint would call frozen weights."""
        params = self.model.named_parameters()
        return {f"{MODEL}{canonical_name(name, param)}" for name, param in params if not param.requires_grad}

    def loaded(self, values: Mapping[str, Any], step: int) -> None:
        """Take over what a checkpoint holds besides tensors, after those were loaded into `state()`.

        How the optimizer goes on (rates, decay, groups) is said by this run's config, not by the checkpoint.
        """
        groups = self.weights.optimizer.param_groups
        self.weights.loaded([{key: value for key, value in g.items() if key != "params"} for g in groups])
        if self.scale is not None and LOSS_SCALE in values:  # a run in another precision had none
            self.scale.load_state_dict(values[LOSS_SCALE])
        self.steps = step

    def _split(
        self, microbatches: Sequence[Batch], total: Tensor | float
    ) -> tuple[list[Mapping[str, Any]], list[tuple[Any, Tensor | float]]]:
        with torch.no_grad():
            ready = [own_part(self.workload, self.mesh, self.workload.ready(batch)) for batch in microbatches]
        inputs = [self.workload.inputs(batch) for batch in ready]
        return inputs, [(self.workload.target(batch), total) for batch in ready]
