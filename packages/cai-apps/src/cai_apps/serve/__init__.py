"""An HTTP server over the engine: OpenAI's interface, metrics and a page for a chat.

`options` says what is served and how much of it. A `rank` is a process that has a model, or its part of one: the first
is a `worker`, which hears the server, others are each a `follower`, and all have a `stepper`, `forms` that are compiled
and a `pulse`. `processes` are these as the server starts and ends them, a `replica` is what it asks of them, and a
`model` are replicas with a tokenizer and a chat template. `wire` is what they say to each other. `schemas`
are the bodies of requests, `prompts` makes ids and sampling of them, `replies` texts of tokens, `tools` calls of texts,
and `bodies` the answers in OpenAI's form. `generation` is a request from its body to its last byte, `app` the routes,
`guard` what stands before them, `connections` the sockets, `metrics` what is counted, and `lifecycle` the server from
its start to its end. `errors` are what clients are told.
"""

from __future__ import annotations

from cai_apps.serve.options import Limits, ModelSource, ServerOptions

__all__ = ["Limits", "ModelSource", "ServerOptions"]
