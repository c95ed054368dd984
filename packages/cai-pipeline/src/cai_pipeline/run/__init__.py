"""A step on ranks: performs a schedule's actions, moves tensors between stages, and measures what both take."""
