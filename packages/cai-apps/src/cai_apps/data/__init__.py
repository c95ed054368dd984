"""Text and conversations to batches: sources, tokenizer, a tokenized cache, an order that any layout can resume."""
