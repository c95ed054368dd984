"""The transforms, in their order, that make a training session from a config and a model without memory."""
