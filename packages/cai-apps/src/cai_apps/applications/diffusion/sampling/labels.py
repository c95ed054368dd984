"""Labels that prompts name, for denoisers that take a label and no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cai_apps.applications.diffusion.model.design import LABELS, Design
from cai_mesh.errors import ConfigError, DataError, did_you_mean


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
    return file.read_text(encoding="utf-8").removesuffix("\n").split("\n") if file.is_file() else []


def numbered(design: Design, names: Sequence[str], before: Path | None) -> tuple[str, ...]:
    """Return the names of the classes of a run in the order of their numbers; none where captions are the condition.

    Args:
        design: the design of the denoiser.
        names: the classes of the data.
        before: the directory of the run that is gone on with: its classes keep their numbers, and others follow.

    Raises:
        DataError: there are more than the denoiser knows, or a name has several lines.
    """
    if design.family.condition != "label":
        return ()
    old = [] if before is None else label_names(before)
    labels = (*old, *(name for name in names if name not in old))
    most = design.denoiser["num_embeds_ada_norm"]
    if len(labels) > most:
        raise DataError(
            f"the data have more classes than the {design.family.name} knows",
            got=f"{len(labels)} classes, such as {labels[-1]!r}",
            expected=f"{most} at most (num_embeds_ada_norm)",
            fix="take some away, or use a model that knows more",
        )
    if several := [name for name in labels if set(name) & {"\n", "\r"}]:
        raise DataError(
            "the name of a class has several lines", got=repr(several[0]), fix="rename its directory"
        )
    return labels
