"""Trackers of experiments beside metrics.jsonl: one writer for each, one thread for each, and no wait of the loop."""
