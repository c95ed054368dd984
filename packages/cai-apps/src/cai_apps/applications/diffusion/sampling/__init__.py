"""Draws pictures with a trained model."""
