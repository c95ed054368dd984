"""Text to batches: sources, tokenizer, a tokenized cache, and a shuffled order that any layout can resume."""
