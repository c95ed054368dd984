"""Recommendation models: DLRM over cached embedding tables, on synthetic clicks, in one process."""
