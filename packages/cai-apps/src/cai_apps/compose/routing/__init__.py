"""Routers of mixtures of experts: their losses, their loads, what balances them, and their decisions kept."""
