"""The page of an alignment run: the training page, with curves of rewards and a summary of the last validation."""

from __future__ import annotations

from dataclasses import replace

from cai_apps.report.page import Page
from cai_apps.report.plots import Curve
from cai_apps.report.training import training_page
from cai_apps.run.files.position import VALIDATION

CURVES = (
    ("rewards", ("rewards/chosen", "rewards/rejected")),
    ("margin of rewards", ("rewards/margins", f"{VALIDATION}rewards/margins")),
    (
        "share of pairs won",
        ("rewards/accuracies", f"{VALIDATION}rewards/accuracies", f"{VALIDATION}rewards/confidence"),
    ),
    ("log-probabilities of answers", ("logps/chosen", "logps/rejected")),
    ("log-ratios to the reference", ("log_ratios/chosen", "log_ratios/rejected")),
    ("KL to the reference", ("kl", f"{VALIDATION}kl")),
    ("tokens of answers", ("lengths/chosen", "lengths/rejected")),
)
"""Titles and fields; those that an algorithm does not measure are left out."""
SUMMARY = (
    ("rewards/accuracies", "pairs won", ".1%"),
    ("rewards/margins", "margin of rewards", ".3f"),
    ("rewards/chosen", "reward of chosen answers", ".3f"),
    ("rewards/rejected", "reward of rejected answers", ".3f"),
    ("kl", "KL to the reference", ".3f"),
)


def alignment_page() -> Page:
    """Return the page of runs that learn from preferences."""
    page = training_page("tokens")

    def summary(records: list[dict]) -> list[tuple[str, str]]:
        rows = page.summary(records)
        for beginning, where in (("", "training"), (VALIDATION, "validation")):
            for key, name, form in SUMMARY:
                last = next((record for record in reversed(records) if beginning + key in record), None)
                if last is not None:
                    number = f"{last[beginning + key]:{form}}"
                    rows.append((f"{name}, {where}", f"{number} (step {last['step']:,})"))
        return rows

    curves = tuple(Curve(title, fields, "What is preferred") for title, fields in CURVES)
    return replace(page, curves=(*page.curves, *curves), summary=summary)
