"""Builds the parts of a diffusion model, loads and exports them."""
