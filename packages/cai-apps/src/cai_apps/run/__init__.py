"""A run from its command to its last checkpoint: launcher, ranks, loop, files."""
