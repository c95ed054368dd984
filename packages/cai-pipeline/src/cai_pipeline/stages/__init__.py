"""The parts of a model that ranks hold: layers are found, balanced, split, and compared with the whole model."""
