"""Optimizers that need norms, rows and columns of parameters, also of those that ranks divide."""

from __future__ import annotations

import logging
from typing import Any

from cai_apps.compat.colossalai.absent import AbsentError
from cai_zero.optimizers import Adafactor as DividedAdafactor
from cai_zero.optimizers import Came
from cai_zero.optimizers import Lamb as DividedLamb
from cai_zero.optimizers import Lars as DividedLars

LOGGER = logging.getLogger("cai_apps.booster")
Params = Any


class Lamb(DividedLamb):
    """LAMB (arXiv:1904.00962): moments are corrected and the ratio is not bounded, as in the paper.

    Args:
        params, lr, betas, eps, weight_decay: as in the paper.
        adam: False.
        bias_correction: True; False, which ColossalAI has, is told in the log, as moments are corrected.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ):
        if adam:
            raise AbsentError("Lamb takes its ratios", got="adam = True", fix="HybridAdam")
        if not bias_correction:
            LOGGER.warning(
                "Lamb(bias_correction=False): moments are corrected, and the norm of a weight has no bound, as in the "
                "paper; ColossalAI's own steps are others, above all the first ones"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Lars(DividedLars):
    """LARS (arXiv:1708.03888).

    Args:
        params, lr, momentum, weight_decay: as in the paper.
        eeta: its trust coefficient.
        epsilon: 0.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ):
        if epsilon:
            raise AbsentError(
                "Lars adds nothing to its denominator", got=f"epsilon = {epsilon}", fix="leave it out"
            )
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, trust=eeta)


class CAME(Came):
    """CAME (arXiv:2307.02047).

    Args:
        params, lr, eps, clip_threshold, betas, weight_decay: as in the paper; without `lr` 2e-4.
    """

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ):
        rate = 2e-4 if lr is None else lr
        super().__init__(
            params, lr=rate, betas=betas, eps=eps, clip=clip_threshold, weight_decay=weight_decay
        )


class Adafactor(DividedAdafactor):
    """Adafactor (arXiv:1804.04235) with steps relative to the weights.

    Args:
        params: the parameters.
        lr: the step, with `relative_step=False`; None: 0.01 at most, and less with every step.
        eps, clip_threshold, decay_rate: as in the paper.
        relative_step: whether steps become smaller.
        beta1, scale_parameter, weight_decay, warmup_init: None, True, 0 and False.

    Raises:
        AbsentError: other than by default, or `lr` with steps that become smaller.
    """

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ):
        if beta1 is not None or not scale_parameter or warmup_init or weight_decay:
            raise AbsentError(
                "Adafactor steps relatively to the weights, without a first moment and decay",
                got=f"{beta1 = }, {scale_parameter = }, {warmup_init = }, {weight_decay = }",
                fix="leave these out, or take CAME, which has a first moment and decay",
            )
        if (lr is None) != relative_step:
            raise AbsentError(
                "Adafactor takes a rate, or steps that become smaller",
                got=f"{lr = }, {relative_step = }",
                fix="Adafactor(params, lr=..., relative_step=False), or neither",
            )
        rate = 1e-2 if lr is None else lr
        options = (rate, decay_rate, (eps[0] ** 0.5, eps[1]), clip_threshold)
        super().__init__(params, *options, relative_step=relative_step)
