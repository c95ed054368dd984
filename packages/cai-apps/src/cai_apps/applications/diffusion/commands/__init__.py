"""Commands of this application."""
