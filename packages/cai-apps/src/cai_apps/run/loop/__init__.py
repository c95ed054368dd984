"""Trains step by step, measures each step and shows it."""
