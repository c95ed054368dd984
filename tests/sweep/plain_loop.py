"""The plain loop every cell is compared with: transformers' model, torch's loss, clip and AdamW, nothing of cai."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig

from sweep.configs import LENGTH, PARAMETER_LIMIT, RESERVED, VOCAB, NotBuilt, first_line

STEPS, BATCH, MICROBATCH, SEED = 3, 4, 2, 7
CLIP, LR, BETAS, WEIGHT_DECAY = 1.0, 3e-3, (0.9, 0.95), 0.1
EPS = 1e-5
"""AdamW divides a gradient by its own size plus this. Some gradients are zero by symmetry (a bias added to all keys)
and hold nothing but rounding, about 1e-9; a smaller number would turn that into whole steps in arbitrary directions."""


@dataclass(frozen=True)
class Trained:
    """What a loop leaves: the loss of every step and of an evaluation, the first gradients' norm, all parameters.

    Of tensor-parallel ranks also the parts of the blocks' bytes and FLOPs that they share.
    """

    losses: list[float]
    norm: float
    parameters: dict[str, Tensor]
    shares: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reference:
    """The plain loop of a row.

    Args:
        trained: what it leaves.
        exact: the same in float64, or None where the model does not run in it: how far apart they are is rounding.
        random: whether the model draws random numbers while it trains although every dropout is zero.
        strange: why the initial values are not of the kind transformers gives, or "".
    """

    trained: Trained
    exact: Trained | None
    random: bool
    strange: str


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of a global step, both [BATCH, LENGTH]; the first labels of a row are masked."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(RESERVED, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, : int(torch.randint(0, LENGTH // 2, (), generator=generator))] = -100
    return ids, labels


def targets(labels: Tensor) -> int:
    """How many next tokens the labels of a global batch ask for."""
    return int((labels[:, 1:] != -100).sum())


def reference(config: PretrainedConfig, initial: Callable[[], dict[str, Tensor]]) -> Reference:
    """Train the model that transformers builds from `config`, from the values `initial` gives by name, or its own.

    Buffers stay as transformers made them. Raises NotBuilt when it cannot be built or does not run.
    """
    torch.manual_seed(SEED)
    try:
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise NotBuilt(f"transformers does not build it: {first_line(error)}") from error
    count = sum(p.numel() for p in model.parameters())
    if count > PARAMETER_LIMIT:
        raise NotBuilt(f"its smallest config known here has {count:,} parameters")
    random = _runs(model.train())
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = initial() or own
    strange = _strange(model, values)
    trained = _train(_filled(model, values))
    if not all(torch.isfinite(torch.tensor([*trained.losses, trained.norm]))):
        raise NotBuilt(f"its plain loop is not finite: losses {trained.losses}, norm {trained.norm}")
    return Reference(trained, _exact(config, values), random, strange)


def _filled(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])
    return model


def _exact(config: PretrainedConfig, values: dict[str, Tensor]) -> Trained | None:
    model = AutoModelForCausalLM.from_config(config).train().double()
    try:
        return _train(_filled(model, values))
    except RuntimeError:
        return None


def _runs(model: nn.Module) -> bool:
    """One forward and backward, to see that they run; returns whether the logits depend on random numbers."""
    ids, _ = batch(0)
    seen = []
    try:
        for seed in (1, 2):
            torch.manual_seed(seed)
            seen.append(model(input_ids=ids).logits)
        seen[0].float().sum().backward()
    except Exception as error:
        raise NotBuilt(f"its own forward on token ids does not run: {first_line(error)}") from error
    model.zero_grad()
    if seen[0].shape[:-1] != ids.shape:
        raise NotBuilt(f"its logits are {list(seen[0].shape)} for ids {list(ids.shape)}: no next-token model")
    return not torch.equal(seen[0], seen[1])


def _strange(model: nn.Module, values: dict[str, Tensor]) -> str:
    """How initial values differ in kind from those transformers draws: constants must be equal, spreads alike."""
    own = dict(model.named_parameters())
    if set(own) != set(values):
        return f"other parameter names: {sorted(set(own) ^ set(values))[:3]}"
    for name, param in own.items():
        ours, theirs = values[name].float(), param.detach().float()
        if ours.shape != theirs.shape or not torch.isfinite(ours).all():
            return f"{name} has shape {tuple(ours.shape)} or values that are not finite"
        if theirs.numel() < 2 or float(theirs.std()) == 0.0:
            if not torch.equal(ours, theirs):
                return f"{name} is not the constant {float(theirs.flatten()[0]):g}"
        elif theirs.numel() >= 256 and not 0.5 < float(ours.std() / theirs.std()) < 2.0:
            return f"{name} has a spread of {float(ours.std()):.2e}, not {float(theirs.std()):.2e}"
    return ""


def _train(model: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
    )
    losses, first = [], 0.0
    for step in range(STEPS):
        ids, labels = batch(step)
        total, loss = targets(labels), 0.0
        for inputs, wanted in zip(ids.split(MICROBATCH), labels.split(MICROBATCH), strict=True):
            logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
            part = F.cross_entropy(logits, wanted[:, 1:].flatten(), reduction="sum") / total
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        first = float(norm) if step == 0 else first
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    losses.append(_evaluated(model.eval()))
    return Trained(losses, first, {name: p.detach().clone() for name, p in model.named_parameters()})


@torch.no_grad()
def _evaluated(model: nn.Module) -> float:
    """The loss of a batch that was not trained on."""
    ids, labels = batch(STEPS)
    logits = [model(input_ids=inputs).logits[:, :-1].flatten(0, 1) for inputs in ids.split(MICROBATCH)]
    wanted = labels[:, 1:].flatten()
    return float(F.cross_entropy(torch.cat(logits), wanted, reduction="sum") / targets(labels))
