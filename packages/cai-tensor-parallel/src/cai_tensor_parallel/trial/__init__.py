"""Try a plan: a small model, cut over ranks that are threads, is compared with itself whole."""
