"""Data of the protein application."""
