"""Commands of `cai` for language models."""
