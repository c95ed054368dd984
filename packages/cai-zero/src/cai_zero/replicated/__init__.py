"""Stages 0 to 2: every rank keeps the parameters, and steps shards of their master weights."""
