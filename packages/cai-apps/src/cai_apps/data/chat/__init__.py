"""Files of conversations to examples: ids as the model's chat template has them, and which of them are trained on."""
