"""Images with captions: where they are from, what the encoders make of them once, and how samples are drawn."""
