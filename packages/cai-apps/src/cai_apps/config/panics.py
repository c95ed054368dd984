"""Panics of libraries written in Rust, which reach Python as exceptions that are no `Exception`."""

from __future__ import annotations

PANICS = "pyo3_runtime"
"""The module that such an exception says it is of; its class cannot be imported."""


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of Rust: a library has met what its authors did not think of."""
    return type(error).__module__ == PANICS
