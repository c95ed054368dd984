"""Trains a denoiser: its workload, its losses and what a step computes."""
