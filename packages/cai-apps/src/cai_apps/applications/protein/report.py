"""What the page of a run shows of its folds: scores over the steps, and each chain at the last one.

A chain has its trace beside the known one, coloured by confidence, the confidence along it, and expected errors.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cai_apps.applications.protein.folds import FOLDS, SCORES, TRUTH
from cai_apps.report.inline_images import svg_of
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import DataError
from cai_mesh.files import inside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cai_apps.applications.protein.data.structures import Chain

BANDS = ((50.0, "#ff7d45"), (70.0, "#ffdb13"), (90.0, "#65cbf3"), (100.0, "#0053d6"))
"""Colours of confidence, each up to a bound, as AlphaFold's database has them."""


def show(run: RunDirectory) -> str:
    """HTML of a run's folds; empty where it has none."""
    home = run.path / FOLDS
    steps = sorted(
        (path.parent for path in home.glob(f"*/{SCORES}") if path.parent.name.isdigit()),
        key=lambda path: int(path.name),
    )
    if not steps:
        return ""
    scores = {int(path.name): _scores(path / SCORES) for path in steps}
    parts = [_table(scores)]
    for name in scores[int(steps[-1].name)]:
        structure = inside(steps[-1], f"{name}.cif", said_by=steps[-1] / SCORES)
        figure = draw_chain(structure, home / TRUTH / f"{name}.cif")
        parts.append(f"<h2>{html.escape(name)} after step {steps[-1].name}</h2>{svg_of(figure)}")
    return "".join(parts)


def _scores(file: Path) -> dict[str, dict[str, float]]:
    """lDDT by chain. Raises DataError for another file."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): {"lddt": float(chain_scores["lddt"])} for name, chain_scores in read.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} holds no scores", cause=str(error), expected="what training wrote") from None


def _table(scores: dict[int, dict[str, dict[str, float]]]) -> str:
    """lDDT of each chain, a row a step."""
    names = list(scores[max(scores)])
    head = "".join(f"<th>{html.escape(name)}" for name in names)
    rows = []
    for step, step_scores in scores.items():
        cells = "".join(
            f"<td>{step_scores[name]['lddt']:.3f}" if name in step_scores else "<td>" for name in names
        )
        rows.append(f"<tr><th>step {step}{cells}")
    return f"<h2>lDDT of alpha carbons beside the known structures</h2><table><tr><th>{head}{''.join(rows)}</table>"


def draw_chain(structure: Path, truth: Path | None = None) -> Figure:
    """The trace, the confidence along the chain and the expected errors of a structure that `cai fold` wrote."""
    from matplotlib.figure import Figure

    from cai_apps.applications.protein.data.structures import read_chain

    errors_path = structure.with_suffix(".pae.json")
    record = json.loads(errors_path.read_text(encoding="utf-8"))[0] if errors_path.is_file() else {}
    chain = read_chain(structure)
    true = None if truth is None or not truth.is_file() else read_chain(truth)
    figure = Figure(figsize=(13, 4), layout="constrained")
    trace, along, errors = (
        figure.add_subplot(1, 3, 1, projection="3d"), figure.add_subplot(1, 3, 2), figure.add_subplot(1, 3, 3)
    )  # fmt: skip
    confidence = np.array(record.get("plddt", [0.0] * len(chain.residue)))
    _draw_trace(trace, chain, confidence, true)
    _draw_confidence(along, confidence)
    if record:
        error_image = errors.imshow(record["predicted_aligned_error"], cmap="Greens_r", vmin=0, vmax=31.75)
        errors.set(title="expected error, angstroms", xlabel="of residue", ylabel="seen from residue")
        figure.colorbar(error_image, ax=errors, shrink=0.8)
    else:
        errors.set_axis_off()
    return figure


def _draw_trace(axes: Any, chain: Chain, confidence: np.ndarray, true: Chain | None) -> None:
    """Alpha carbons; the known ones in grey, laid upon them."""
    points = chain.atoms[:, 1]
    if true is not None:
        alpha_mask = true.known[:, 1]
        laid = laid_upon(true.atoms[:, 1], points, alpha_mask)
        axes.plot(*np.where(alpha_mask[:, None], laid, np.nan).T, color="#bbb", linewidth=3, label="known")
    for first in range(len(points) - 1):
        axes.plot(*points[first : first + 2].T, color=_colour(confidence[first]), linewidth=2)
    axes.set(title="alpha carbons, known ones grey" if true is not None else "alpha carbons")
    axes.set_axis_off()


def _draw_confidence(axes: Any, confidence: np.ndarray) -> None:
    places = np.arange(1, len(confidence) + 1)
    axes.bar(places, confidence, width=1.0, color=[_colour(value) for value in confidence])
    axes.set(title="confidence (pLDDT)", xlabel="residue", ylim=(0, 100))


def _colour(confidence: float) -> str:
    return next((colour for bound, colour in BANDS if confidence <= bound), BANDS[-1][1])


def laid_upon(points: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Points [R, 3] moved to lie on targets [R, 3] as well as can be, by those that a mask [R] has (Kabsch, 1976)."""
    center, target_center = points[mask].mean(0), targets[mask].mean(0)
    left_vectors, _, right_vectors = np.linalg.svd(
        (points[mask] - center).T @ (targets[mask] - target_center)
    )
    sign = np.diag([1.0, 1.0, np.sign(np.linalg.det(left_vectors @ right_vectors))])
    return (points - center) @ (left_vectors @ sign @ right_vectors) + target_center
