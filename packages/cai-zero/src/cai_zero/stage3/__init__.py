"""Stage 3: parameters themselves are sharded, and unsharded only while their block is in use."""
