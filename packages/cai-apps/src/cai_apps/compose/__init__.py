"""From a config and a model without memory to a session that trains: the transforms and their order."""
