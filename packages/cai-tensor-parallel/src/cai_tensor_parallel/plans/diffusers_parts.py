"""Plans of known parts of diffusers, as data: attention and feed-forward layers, cut by the class of the part."""

from __future__ import annotations

from dataclasses import dataclass

LIBRARY = "diffusers"


@dataclass(frozen=True)
class PartLayers:
    """The layers of a class of modules, by names inside it; those that a module does not have are left out.

    Args:
        columns: linear layers cut by output features.
        rows: those that take these features in.
        between: modules with parameters that act on a rank's heads alone: their gradients are summed.
        counts: attribute that counts heads; "": there are none.
        how: name inside it of the module whose class says how columns are used: `HEAD_BY_HEAD` or `BLOCKS`.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    between: tuple[str, ...] = ()
    counts: str = ""
    how: str = ""


PARTS = {
    "Attention": PartLayers(
        ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
        ("to_out.0", "to_add_out"),
        ("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        counts="heads",
        how="processor",
    ),
    "FeedForward": PartLayers(("net.0.proj",), ("net.2",), how="net.0"),
}
"""Layers by the class of diffusers. All else of a denoiser stays whole: convolutions, norms, embeddings, adaLN."""
HEAD_BY_HEAD = ("AttnProcessor", "AttnProcessor2_0", "JointAttnProcessor2_0")
"""Processors that compute each of `attn.heads` heads by itself and take sizes from what the layers make."""
BLOCKS = {"GELU": 1, "ApproximateGELU": 1, "LinearActivation": 1, "GEGLU": 2, "SwiGLU": 2}
"""Activations: how many blocks lie side by side in what their layer makes, as value and gate do."""
