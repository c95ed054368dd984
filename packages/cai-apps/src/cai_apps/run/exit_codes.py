"""Exit codes of commands and ranks, and how long a rank that failed stays."""

from __future__ import annotations

import signal

FAILURE, USER_ERROR = 1, 2

STOPPED = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 128 + signal.SIGINT}
"""Exit codes of a run that a signal stopped."""

GRACE_SECONDS = 1.0
"""How long a failed rank stays before it exits. A rank that only lost a peer so leaves after that peer, and
the agent, which reports the first exit it sees, names the rank where it began."""
