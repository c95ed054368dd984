"""What a config will need, worked out without weights and without ranks."""
