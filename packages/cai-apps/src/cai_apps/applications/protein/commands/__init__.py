"""Commands of the protein application."""
