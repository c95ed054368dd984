"""Cut a model on one rank by a plan, and refuse what would then go wrong in silence."""
