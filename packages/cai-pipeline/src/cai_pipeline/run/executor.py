"""Executes one rank's actions. Only this file applies a schedule to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cai_mesh.comm import AnyMesh, ParallelMesh, broadcast
from cai_mesh.errors import PlanError
from cai_mesh.gradients import Deferred, defer
from cai_mesh.protocols import CommHandle, GradSync, ParameterSharding
from cai_mesh.storage import show_stage_gradients
from cai_pipeline.plans.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, Action, Kind, Program, holders
from cai_pipeline.plans.checker import check
from cai_pipeline.plans.lowering import batches, lower
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules import begin_with, forward_only
from cai_pipeline.plans.simulation import Timeline
from cai_pipeline.run.auto import MEASURED_STEP, Choice, choose
from cai_pipeline.run.backward_thread import open_backward
from cai_pipeline.run.recorder import SHOWN_STEP, Recorder, again, gather, timeline
from cai_pipeline.run.transfer import Metas, P2PCommunicator, PendingReceive, TensorMeta, signature_of
from cai_pipeline.run.wire import Wire, check_wire
from cai_pipeline.stages.boundary import Tensors, gradients_to_send, tensors_in, without_graph
from cai_pipeline.stages.split import check_shared
from cai_pipeline.stages.stage import Stages, run_stage

Inputs = Mapping[str, Any]
LossFn = Callable[[Any, Any], torch.Tensor]
Boundary = tuple[int, tuple[Any, ...]]


@dataclass
class Observers:
    """Functions that a runner calls.

    Args:
        on_choice: called with what "auto" has chosen.
        on_recorded: called on every rank, with the fourth step of a pipeline of several ranks as it ran, in seconds,
            and as it is simulated for what its actions took. Given on all ranks or on none.
        on_action: called with each action before it is begun, and with None after the last of a step.
    """

    on_choice: Callable[[Choice], object] | None = None
    on_recorded: Callable[[Timeline, Timeline], object] | None = None
    on_action: Callable[[Action | None], object] = lambda action: None


class PipelineRunner:
    """Runs training and evaluation steps of a split model on the ranks of a pipeline.

    Every rank of the pp group makes one and calls the same methods with the same microbatches. With a pp degree of
    1 (a mesh without splitting, any model) a step is plain gradient accumulation.

    Args:
        model: the model that `split` returned.
        mesh: the mesh given to `split`.
        schedule: name in SCHEDULES; or "auto": the second step is measured, and from the third on the fastest schedule
            is used that `search` finds for it in the memory that is left; or the compute actions of each rank, for the
            stages that `split` placed there.
        microbatches: microbatches per step.
        loss_fn: (the model's output, target) -> scalar; called on the last stage. Losses are added over
            microbatches, so `loss_fn` does any averaging.
        grad_sync: combines gradients over data ranks; deferred in all backwards of a stage but its last, and in all
            that are split, and finished at the end of a step.
        sharding: shards parameters; follows the UNSHARD, RESHARD and REDUCE actions when its driver is "actions".
        observers: functions that are called with what the runner does.
        wire: the form of the hidden states and gradients that stages on different ranks send each other: "full", or
            "fp8", in a byte an element and a scale a token (`cai_pipeline.run.wire`), which rounds both.

    Raises:
        PlanError: the schedule is unknown or does not fit, or the model is not split for it or for this mesh; or
            stages have different parts of a parameter that they share.
        MeshError: the mesh has no axis "pp".
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: AnyMesh,
        *,
        schedule: str | Program = "1f1b",
        microbatches: int,
        loss_fn: LossFn,
        grad_sync: GradSync | None = None,
        sharding: ParameterSharding | None = None,
        observers: Observers | None = None,
        wire: Wire = "full",
    ):
        mesh = ParallelMesh.of(mesh, alone="pp")
        mesh.require("pp", "PipelineRunner")
        check_wire(wire)
        self.held = Stages.of(model).held
        ranks = mesh.degree("pp")
        if max(self.held) + 1 != ranks:
            raise PlanError(
                "the model is not split for this mesh",
                got=f"stages on {max(self.held) + 1} ranks, pp degree {ranks}",
                fix="call split(model, mesh) with the same mesh first",
            )
        self.model = model
        self.microbatches = microbatches
        self.loss_fn = loss_fn
        self.grad_sync = grad_sync
        self.sharding = sharding if sharding is not None and sharding.driver == "actions" else None
        self.mesh = mesh
        self.observers = observers or Observers()
        self.rank = mesh.index("pp")
        self.group = mesh.group("pp")
        check_shared(model, self.group)
        if ranks > 1:
            show_stage_gradients(model, mesh)
        self.device = torch.device(mesh.device_type)
        open_backward(self.device)
        self.metas: dict[Boundary, Metas] = {}
        self.auto, self.steps = schedule == "auto" and ranks > 1, 0
        self.follow(begin_with(schedule, self.held, microbatches) if isinstance(schedule, str) else schedule)
        self.p2p = None
        if self.group is not None:
            self.p2p = P2PCommunicator(self.group, self.device, self._peers(), wire)

    def follow(self, schedule: Program) -> None:
        """Take another program for the steps to come. All ranks of the pipeline do, between the same steps.

        Raises PlanError for a program that is wrong, or for stages on other ranks.
        """
        _check_placed(schedule, self.held)
        self.compute, self.program = schedule, lower(schedule)
        check(self.program, self.microbatches)
        self._training = batches(self.program)[self.rank]

    def _peers(self) -> set[int]:
        stage_ranks = holders(self.program)
        return {stage_ranks[a.partner.stage] for a in self.program[self.rank] if a.kind in TRANSFERS}

    def step(self, microbatches: Sequence[Inputs], targets: Sequence[Any]) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients are added to `.grad`.

        Args:
            microbatches: keyword arguments of the model for each microbatch, the same on all pp ranks.
            targets: the second argument of `loss_fn` for each microbatch; used on the last stage.

        Returns:
            the loss summed over microbatches, on every stage: float64, no dims, no graph.

        Raises:
            PlanError: not as many microbatches as the schedule was made for, or as targets.
        """
        if len(microbatches) != self.microbatches:
            raise PlanError("wrong number of microbatches", got=len(microbatches), expected=self.microbatches)
        state = _StepState(self, microbatches, _targets(microbatches, targets), training=True)
        self.steps += 1
        chooses_schedule = self.auto and self.steps == MEASURED_STEP
        on_recorded = self.observers.on_recorded
        reports_timeline = on_recorded is not None and self.group is not None and self.steps == SHOWN_STEP
        recorder = Recorder(self.group, self.device) if chooses_schedule or reports_timeline else None
        state.perform(self._training, recorder)
        if self.grad_sync is not None:
            self.grad_sync.finish()
        if recorder is not None and chooses_schedule:
            self._choose(recorder)
        if recorder is not None and on_recorded is not None and reports_timeline:
            ran = gather(recorder.recorded(), self.group)
            on_recorded(timeline(ran), again(ran, self.compute, self.held))
        return self._on_all_ranks(state.loss)

    def _choose(self, recorder: Recorder) -> None:
        """Follow the schedule that is best for what the step took."""
        choice = choose(recorder, self.compute, self.held, self.microbatches, self.mesh)
        self.follow(choice.program)
        if self.observers.on_choice is not None:
            self.observers.on_choice(choice)

    @torch.no_grad()
    def evaluate(
        self, microbatches: Sequence[Inputs], targets: Sequence[Any], *, loss_fn: LossFn | None = None
    ) -> torch.Tensor:
        """The loss of any number of microbatches, forward only, returned as by `step`. Keeps the train or eval mode.

        Args:
            microbatches: keyword arguments of the model for each microbatch, the same on all pp ranks.
            targets: the second argument of the loss for each microbatch; used on the last stage.
            loss_fn: a loss in place of the runner's, called with the microbatches in their order.
        """
        state = _StepState(
            self, microbatches, _targets(microbatches, targets), training=False, loss_fn=loss_fn
        )
        state.perform(self._forwards(len(microbatches)))
        return self._on_all_ranks(state.loss)

    @torch.no_grad()
    def forward(self, microbatch: Inputs) -> Any:
        """The model's output for one microbatch, on the rank of the last stage; None on the others."""
        state = _StepState(self, [microbatch], None, training=False)
        state.perform(self._forwards(1))
        return state.output

    def _forwards(self, microbatches: int) -> list[tuple[Action, ...]]:
        return batches(lower(forward_only(self.held, microbatches)))[self.rank]

    def _on_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        broadcast(loss, self.held[-1], self.group).wait()
        return loss


def _check_placed(program: Program, stage_ranks: Held) -> None:
    """Raise PlanError where a program has its stages on other ranks than the model."""
    program_ranks = holders(program)
    if len(program) != max(stage_ranks) + 1 or [
        program_ranks.get(stage) for stage in range(len(stage_ranks))
    ] != list(stage_ranks):
        raise PlanError(
            "the model is not split for this schedule",
            got=f"stages on ranks {list(stage_ranks)}",
            expected=f"stages on ranks {[rank for _, rank in sorted(program_ranks.items())]}",
            fix="call split(model, mesh, chunks=..., placement=...) as the schedule has them",
        )


def _targets(microbatches: Sequence[Inputs], targets: Sequence[Any]) -> Sequence[Any]:
    if not microbatches or len(targets) != len(microbatches):
        raise PlanError(
            "each microbatch needs a target", got=f"{len(microbatches)} microbatches, {len(targets)} targets"
        )
    return targets


@dataclass
class _SavedForward:
    """The inputs of a microbatch's backward: the received tensors, and the graph of each output without its memory.

    An output without a gradient has None; the last stage has its loss.
    """

    received: Tensors
    roots: tuple[torch.Tensor | GradientEdge | None, ...]


class _StepState:
    """The state of one step: tensors received, tensors to send, and forwards that wait for their backward."""

    def __init__(
        self,
        runner: PipelineRunner,
        inputs: Sequence[Inputs],
        targets: Sequence[Any] | None,
        *,
        training: bool,
        loss_fn: LossFn | None = None,
    ):
        self.stages = Stages.of(runner.model)
        for microbatch in inputs if self.stages.check is not None else ():
            self.stages.check(runner.model, microbatch)  # type: ignore[misc]
        self.runner = runner
        self.inputs = inputs
        self.targets = targets
        self.training = training
        self.loss_fn = loss_fn or runner.loss_fn
        self.signatures = [signature_of(microbatch, runner.device) for microbatch in inputs]
        self.loss = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.output: Any = None
        self.receiving: dict[Action, PendingReceive] = {}
        self.outgoing: dict[Action, Tensors] = {}
        self.saved: dict[tuple[int, int | None], _SavedForward] = {}
        self.deferred: dict[tuple[int, int | None], Deferred] = {}
        self.parameters: dict[int, list[nn.Parameter]] = {}
        self.unsharding: dict[int, CommHandle] = {}
        self.unsharded: set[int] = set()
        self.reduced: set[int] = set()
        self.backwards_left = dict.fromkeys(self.stages.own, len(inputs))
        self.recorder: Recorder | None = None

    def perform(self, grouped: Sequence[tuple[Action, ...]], recorder: Recorder | None = None) -> None:
        """Perform this rank's actions of a lowered program, as `batches` groups them."""
        self.recorder = recorder
        # not kept: a step that refers to itself would hold its inputs until the next collection of garbage
        performers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.REDUCE: self._reduce,
        }
        for batch in grouped:
            self.runner.observers.on_action(batch[0])
            if batch[0].kind in TRANSFERS:
                self._transfer(batch, self.runner.held[batch[0].partner.stage])
            else:
                performers[batch[0].kind](batch[0])
                if recorder is not None and batch[0].kind in COMPUTE:
                    recorder.end(batch[0])
        if self.runner.p2p is not None:
            self.runner.p2p.finish()
        self.runner.observers.on_action(None)

    def _forward(self, action: Action) -> None:
        self._wait_unsharded(action.stage)
        runner, m = self.runner, action.microbatch
        assert m is not None
        received = self._taken(Kind.RECV_F, action)
        for tensor in received if self.training else ():
            tensor.requires_grad_()
        self._begin()
        result = run_stage(runner.model, received or None, self.inputs[m], index=action.stage)
        roots: tuple[torch.Tensor | GradientEdge | None, ...] = ()
        if not self.stages.own[action.stage].is_last:
            sent = tensors_in(result)
            self.outgoing[Action(Kind.SEND_F, action.stage, m)] = without_graph(sent)
            roots = tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent)
        elif self.targets is None:
            self.output = result
        else:
            loss = self.loss_fn(result, self.targets[m])
            if loss.numel() != 1:
                raise PlanError("loss_fn must return a scalar", got=f"a tensor of shape {tuple(loss.shape)}")
            self.loss += loss.detach().to(self.loss.device, torch.float64).reshape(())
            roots = (loss,)
        if self.training:
            self.saved[action.stage, m] = _SavedForward(received, roots)

    def _backward(self, action: Action) -> None:
        self._wait_unsharded(action.stage)
        saved = self.saved.pop((action.stage, action.microbatch))
        gradients = self._taken(Kind.RECV_B, action) or (None,)
        learned = [pair for pair in zip(saved.roots, gradients, strict=True) if pair[0] is not None]
        self._begin()
        self.backwards_left[action.stage] -= 1
        sync = self.runner.grad_sync
        last = not self.backwards_left[action.stage] and action.kind is Kind.BACKWARD
        with sync.defer() if sync is not None and not last else nullcontext():
            if learned:
                torch.autograd.backward([root for root, _ in learned], [gradient for _, gradient in learned])
        if saved.received:
            sent = Action(Kind.SEND_B, action.stage, action.microbatch)
            self.outgoing[sent] = gradients_to_send(saved.received)

    def _backward_input(self, action: Action) -> None:
        with defer(self._parameters(action.stage)) as deferred:
            self._backward(action)
        self.deferred[action.stage, action.microbatch] = deferred

    def _backward_weight(self, action: Action) -> None:
        self._begin()
        self.deferred.pop((action.stage, action.microbatch)).flush()

    def _begin(self) -> None:
        if self.recorder is not None:
            self.recorder.begin()

    def _parameters(self, stage: int) -> list[nn.Parameter]:
        if stage not in self.parameters:
            with self.stages.own[stage].shown(self.runner.model):
                self.parameters[stage] = list(self.runner.model.parameters())
        return self.parameters[stage]

    def _unshard(self, action: Action) -> None:
        model, sharding = self.runner.model, self.runner.sharding
        if sharding is not None:
            self.unsharded.add(action.stage)
            with self.stages.own[action.stage].shown(model):
                self.unsharding[action.stage] = sharding.unshard(model)

    def _wait_unsharded(self, stage: int) -> None:
        under_way = self.unsharding.pop(stage, None)
        if under_way is not None:
            under_way.wait()

    def _reshard(self, action: Action) -> None:
        if self.runner.sharding is not None:
            self.unsharded.remove(action.stage)
            self._done_with(action.stage, self.runner.sharding.reshard, last=not self.unsharded)

    def _reduce(self, action: Action) -> None:
        if self.runner.sharding is not None:
            self.reduced.add(action.stage)
            self._done_with(
                action.stage, self.runner.sharding.reduce, last=self.reduced == self.stages.own.keys()
            )

    def _done_with(self, index: int, do: Callable[[nn.Module], None], *, last: bool) -> None:
        """Do something to what a stage holds; what belongs to no part of the model waits for the rank's last stage."""
        stage, model = self.stages.own[index], self.runner.model
        if last:
            with stage.shown(model):
                do(model)
        else:
            for name in stage.parts:
                do(model.get_submodule(name))

    def _taken(self, kind: Kind, action: Action) -> Tensors:
        """The tensors that another rank has sent for an action, or the stage beside it on this one; () at the ends."""
        receive = Action(kind, action.stage, action.microbatch)
        pending = self.receiving.pop(receive, None)
        return self.outgoing.pop(receive.partner, ()) if pending is None else pending.wait()

    def _transfer(self, batch: tuple[Action, ...], peer: int) -> None:
        p2p, metas = self.runner.p2p, self.runner.metas
        assert p2p is not None
        send = next((action for action in batch if action.kind in SENDS), None)
        receive = next((action for action in batch if action.kind in RECEIVES), None)
        tensors = self.outgoing.pop(send) if send is not None else ()
        metas_to_send = self._metas_to_send(send, tensors)
        unknown = receive is not None and self._boundary(receive) not in metas
        if metas_to_send is not None or unknown:
            count = self.stages.own[receive.stage].receives if receive is not None and unknown else 0
            received_metas = p2p.exchange_meta(peer, metas_to_send, count)
            if receive is not None and received_metas is not None:
                metas[self._boundary(receive)] = received_metas
        expected = metas[self._boundary(receive)] if receive is not None else None
        pending = p2p.exchange(peer, [tensor.contiguous() for tensor in tensors], expected)
        if receive is not None and pending is not None:
            self.receiving[receive] = pending

    def _metas_to_send(self, send: Action | None, tensors: Tensors) -> Metas | None:
        """The shapes and dtypes to send before the tensors, or None when the receiver knows them."""
        if send is None:
            return None
        metas, boundary, tensor_metas = (
            self.runner.metas,
            self._boundary(send),
            tuple(map(TensorMeta.of, tensors)),
        )
        if boundary not in metas:
            metas[boundary] = tensor_metas
            return tensor_metas
        if metas[boundary] != tensor_metas:
            raise PlanError(
                f"stage {send.stage} has an output of another shape or dtype than before for the same inputs",
                got=tensor_metas,
                expected=metas[boundary],
                cause="the model's dtype changed after its PipelineRunner was made",
                fix="make a new PipelineRunner",
            )
        return None

    def _boundary(self, transfer: Action) -> Boundary:
        """The key that a transfer's shape depends on: the stage before the boundary, and the model inputs' shapes."""
        assert transfer.microbatch is not None
        stage_before = transfer.stage - (transfer.kind in (Kind.RECV_F, Kind.SEND_B))
        return stage_before, self.signatures[transfer.microbatch]
