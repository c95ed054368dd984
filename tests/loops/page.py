"""docs/loops.md, written from the tables of cases: `python tests/loops/page.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loops.md"

INTRODUCTION = """# Loops

A loop that trains a plain model trains a sharded or offloaded one: what it reads, writes, clips, replaces or clears of
`param.grad` counts as it would for a plain parameter. Each line below is such a loop (`tests/loops`), run in
float64 on two ranks that share a batch, or on one under offload, and compared with the plain loop on the whole batch:
what it saw on the way and every weight at the end. **right** means equal within 1e-9; **refused** that an error names
the cause and the fix. In no case is a result wrong without an error.

## What to know

- **Reading a gradient is collective.** A rank has a part of it. Norms and sums are those of the whole gradient, on
  every rank; other operators gather it. So all ranks must read alike, as all run the same loop: `if rank == 0:
  print(p.grad.norm())` waits for ranks that never come. `cai_mesh.gradients.local_gradient(p)` is what is here: it
  talks to the others only where the gradient is still to be reduced.
- **In stage 3 and under offload a rank keeps flat parts**, and parameters and gradients are shown whole, as a DTensor
  is: `shape`, `ndim`, `numel()`, places in `p.grad` and `p.data`, norms, sums. What is made of `p.data` or `p.detach()`
  is whole too, and collective. Optimizers step the flat parts, and `state[p]` is as flat: a norm of it is this rank's.
  `cai_mesh.gradients.flat_of(p)` and `local_gradient(p)` are what is here. Places in `p` itself, `p.data = ...` and, in
  a loss outside blocks, all but elementwise operators, sums, means and norms are refused.
- **Gradients stay until they are cleared**, after a step too: `step(); step()`, clearing every second step and a look
  at `.grad` after the step are as in a plain loop; `zero_grad(set_to_none=False)` leaves zeros, by which AdamW decays.
  Under offload a step gives their memory back: what needs their values before `zero_grad` raises, counting does not.
- **With pipeline stages** a norm over `model.parameters()` would be that of one stage: torch's clipping, sums of norms
  and `GradScaler` are refused, `cai_mesh.clip_grad_norm_(model.parameters(), max_norm, mesh)` counts every stage.
  The norm of a single parameter is right.
- **A parameter that no rank has used** in a step is not stepped, as torch does not: no decay, no moments, no count. One
  that some rank has used is. The ranks agree by one message of a byte a parameter.
- **An average of the weights**: `cai_zero.Ema(model, optimizer, decay=0.999)`; copies of the model, which torch's
  `AveragedModel` makes, are refused in stage 3 and under offload.
- **Frozen at first, trained later**: `requires_grad_(True)` and `optimizer.add_param_group` work in every stage and
  under offload. Memory for gradients and state is taken then.
- **Parameters that the optimizer does not have** show the average of their gradients over the ranks, so they may be
  clipped with the others; each reading sends them.
- **What is written to `param_groups`** in stages 0 to 2 is written to this rank's part, and sent to all ranks at once,
  one message a write: write to `model.parameters()` where you can.
- **With `MixedPrecision(split_master=True)`** write to parameters through `param.data`; `param.clamp_()` is refused at
  the next step. The other loops below train as without it (`tests/loops/test_loops.py`).
- **`model.state_dict()` in stage 3 and under offload** has parts, shown whole, for this model sharded as it is;
  pickling it warns, other files of it (safetensors, DCP, numpy) are refused. `load_state_dict` takes whole tensors
  too. `full_state_dict(model)` has whole tensors, `cai_mesh.checkpoint.save` what any number of ranks loads.
- **State of a rank is signed.** `optimizer.state_dict()` that one rank has saved and another loads raises, at the load
  or at the next step. `full_optimizer_state_dict(optimizer, model)` is for any ranks, stages and plain loops.
- **Change the model first.** Another head, a resized embedding or an adapter after `parallelize` or `shard_module`
  raises where nobody would cut or reduce it.
- **`backward(inputs=...)`** reaches the parameters it names in every stage and under offload, beside other backwards
  too. With a torch that does not ask inputs what they stand for (2.11), stage 3 and offload raise where it has reached
  some parameters alone, and at a step that finds no gradient after a forward.
- **Ranks run the same loop.** One that runs a backward, a step or an evaluation alone is told what the others began.
- **A plain tensor put into `.grad`** is this rank's, and is averaged over the ranks.
- **A model that `parallelize` has cut**, without ZeRO, shows its gradients the same way: a rank reads its part, in its
  shape, with the norms and sums of the whole. A data-parallel loop may average them by collectives of its own; those
  of ZeRO are averaged already, and a collective of one is refused.
- **Accelerate, Trainer, Fabric**: shard or offload first, then hand model and optimizer over through
  `cai_zero.integrations`: `accelerate.prepare(accelerator, model, optimizer, ...)`, `transformers.ZeroTrainer`
  (with `mesh=` for tensor-parallel ranks, which read the same samples), `fabric.ZeroStrategy`. By themselves they
  would wrap the model in DistributedDataParallel, which is refused. What they save is whole, of the optimizer too, and
  loads on any ranks and stages.

## Cases
"""

LAYERS = """
## Models

The same for models whose blocks return, hold or use what blocks of real models do (`tests/layers/models.py`). What is
refused in stage 3 and under offload uses weights outside their block's forward, where they are flat parts or not there;
**by autograd**: autograd itself raises, because the weights have been freed since (a version error).

"""

MISUSE = """
## Refused, with the fix

Each is told on every rank, before it would train nothing or ranks apart (`tests/loops/misuse.py`).

"""


def text() -> str:
    """The whole page."""
    from layers.models import MODELS
    from layers.table import FORMS
    from layers.table import REFUSED as UNFIT
    from loops import kept_gradients, loops_of_others, shapes  # noqa: F401 (their cases are in the table)
    from loops.cases import CASES, REFUSED
    from loops.kit import STAGES
    from loops.misuse import MISUSES

    def word(name: str, stage: str) -> str:
        return "**refused**" if (name, stage) in REFUSED else "right"

    def layer_word(name: str, form: str) -> str:
        by_autograd = "inplace" in UNFIT.get((name, form), "")
        return "**by autograd**" if by_autograd else "**refused**" if (name, form) in UNFIT else "right"

    lines = [INTRODUCTION, f"| loop | {' | '.join(STAGES)} |", f"|---|{'---|' * len(STAGES)}"]
    for name in CASES:
        cells = " | ".join(word(name, stage) for stage in STAGES)
        lines.append(f"| {name.replace('_', ' ')} | {cells} |")
    lines += [LAYERS + f"| model | {' | '.join(FORMS)} |", f"|---|{'---|' * len(FORMS)}"]
    for name in MODELS:
        cells = " | ".join(layer_word(name, form) for form in FORMS)
        lines.append(f"| {re.sub('(?<!^)(?=[A-Z])', ' ', name).lower()} | {cells} |")
    lines.append(MISUSE + "| what | the error says |\n|---|---|")
    lines += [f"| {name} | ... {says} ... |" for name, (_, _, says) in MISUSES.items()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    PAGE.write_text(text())
