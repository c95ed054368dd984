"""What a run did: plots and one HTML page."""
