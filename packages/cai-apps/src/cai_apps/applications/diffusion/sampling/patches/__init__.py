"""Lets several ranks make one picture together, each a strip of its latents (DistriFusion, arXiv:2402.19481)."""
