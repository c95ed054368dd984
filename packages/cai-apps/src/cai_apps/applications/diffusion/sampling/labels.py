"""Labels that prompts name, for denoisers that take a label and no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cai_apps.applications.diffusion.model.design import LABELS, Design
from cai_mesh.errors import ConfigError, did_you_mean


def label_numbers(design: Design, prompts: Sequence[str], names: Sequence[str]) -> list[int]:
    """Numbers of labels that prompts name.

    Args:
        names: the names of the labels that have one, in their order.

    Raises:
        ConfigError: a prompt is neither a name nor a number that the denoiser knows.
    """
    label_count = design.denoiser["num_embeds_ada_norm"]
    for prompt in prompts:
        if prompt not in names and not (prompt.isdecimal() and int(prompt) < label_count):
            raise ConfigError(
                f"no label {prompt!r}",
                expected=f"a number below {label_count}, or a name",
                fix=did_you_mean(prompt, names),
            )
    return [names.index(prompt) if prompt in names else int(prompt) for prompt in prompts]


def label_names(directory: Path) -> list[str]:
    """Names of the labels that a run was trained on, in their order; empty where nobody wrote them."""
    file = directory / LABELS
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
