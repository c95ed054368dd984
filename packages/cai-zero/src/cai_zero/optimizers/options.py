"""Checks of hyperparameters."""

from __future__ import annotations

from typing import Any

from cai_mesh.errors import PlanError


def check_options(what: str, **options: Any) -> None:
    """Raise `PlanError` for a negative number, a beta outside [0, 1), or something that is not a number at all.

    `betas` is a sequence of betas; None stands for "not used"; everything else is a number not below 0.
    """
    for name, value in options.items():
        if value is None:
            continue
        values = value if name in ("betas", "eps") and isinstance(value, tuple | list) else [value]
        beta = name in ("betas", "momentum", "beta2")
        for number in values:
            good = number is None or (
                not isinstance(number, bool | str) and number >= 0 and (not beta or number < 1)
            )
            if not good:
                expected = "0 <= beta < 1" if beta else "a number that is not negative"
                raise PlanError(f"{what}: {name} is out of range", got=value, expected=expected)
