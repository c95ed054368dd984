"""Commands of models that classify."""
