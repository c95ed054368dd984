"""Sums of gradients and gathers of weights over the ranks that share a parameter, the same for every stage."""
