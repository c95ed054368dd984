"""Moves the chunks of one model while it trains, by a plan of its traced steps."""
