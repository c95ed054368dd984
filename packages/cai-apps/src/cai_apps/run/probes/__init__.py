"""What a rank writes down of chosen steps: its operators over time, and what is in its memory."""
