"""Which models are refused in which form, by which error, and the loop that they are tried in."""

from __future__ import annotations

from layers.models import MODELS
from loops.cases import clip_all, steps
from loops.kit import Start, outcome

FORMS = ("zero1", "zero3", "offload")

_OUTSIDE = (
    "AChildOutside",
    "ALinearChildOutside",
    "AMethod",
    "ForwardItself",
    "AWeightOutside",
    "AWeightByMatmul",
    "ANarrowWeightOutside",
    "AScaleOutside",
)
_FLAT = ("zero3", "offload")
REFUSED = {
    **{(name, form): "used outside its block" for name in _OUTSIDE for form in _FLAT},
    **{(name, form): "written to in forward" for name in ("MaxNorm", "MaxNormInABlock") for form in _FLAT},
    **{("ACachedWeight", form): "in whose place another is trained" for form in _FLAT},
    **{("AttributeMadeLast", form): "modified by an inplace operation" for form in _FLAT},
    **{("CastsItsRouter", form): "does not lie in its chunk" for form in FORMS},
    ("MaxNorm", "zero1"): "other values to the same weights",
}
for used_whole in ("AChildOutside", "AScaleOutside"):  # of one dimension, and on one rank not cut
    del REFUSED[used_whole, "offload"]


def trained(name: str, form: str):
    """The outcome of three clipped steps."""

    def loop(run) -> None:
        steps(run, clip_all, count=3)

    loop.start = Start(model=MODELS[name])
    verdict, result = outcome(loop, form)
    # what autograd itself says of weights that have been freed since
    freed = verdict == "crashed" and "expected version 0" in result
    return ("refused" if freed else verdict), result
