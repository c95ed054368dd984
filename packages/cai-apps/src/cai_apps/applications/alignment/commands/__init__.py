"""Commands of alignment runs."""
