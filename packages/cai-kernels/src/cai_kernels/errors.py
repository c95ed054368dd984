"""The error of this package: what, got, expected, fix. It stands alone so that the package needs only torch."""

from __future__ import annotations


class KernelError(ValueError):
    """An argument a kernel cannot take, or a backend that cannot run here."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str = ""):
        lines = [what]
        for label, value in (("got", got), ("expected", expected), ("fix", fix)):
            if value is not None and value != "":
                lines.append(f"  {label + ':':<10}{value}")
        super().__init__("\n".join(lines))
