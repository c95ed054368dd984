"""What a run is: sections as dataclasses, TOML files, checks before ranks start."""
