"""The plan of a model that is given none: of its parts, if it is a denoiser, or of its class of transformers."""

from __future__ import annotations

from torch import nn

from cai_tensor_parallel.finding.hugging_face import plan_of_transformers
from cai_tensor_parallel.finding.parts import plan_of_parts
from cai_tensor_parallel.plans.plan import Plan


def plan_for(model: nn.Module, ranks: int = 1) -> Plan:
    """The plan of a Hugging Face model: its config's `base_model_tp_plan`, the one in `PLANS` for its type, or one
    found from its structure and proved on a small model of its class and config. A denoiser of diffusers, or a model
    with one inside, has that of its parts, see `parts`.

    Input embedding and output head, and what is tied to them, are cut by vocabulary, where the plan has no other role
    for them and the embedding computes nothing more than a lookup; in a plan from structure where that is proved, too.
    Globs of a carried or built-in plan that are for parts this model does not have are left out. A carried plan with
    no `*` says nothing of the layers (many name the embedding alone) and does not count.

    Args:
        ranks: that share features; parts of a denoiser that cannot be cut over so many stay whole.

    Raises `PlanError` for a model with no plan, with a template to fill in.
    """
    of_transformers = hasattr(getattr(model, "config", None), "to_json_string")
    parts_plan = None if of_transformers else plan_of_parts(model, ranks)
    return plan_of_transformers(model) if parts_plan is None else parts_plan
