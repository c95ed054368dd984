"""Keeps activations at block boundaries in host memory between forward and backward."""

from cai_gemini.activations.blocks import ActivationOffload, offload_activations

__all__ = ["ActivationOffload", "offload_activations"]
