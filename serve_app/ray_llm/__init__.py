"""Puts this project's engine and API behind the ingress of Ray Serve LLM, as the `server_cls` of an `LLMConfig`.

`server` has the class; `reading` takes the config; `local_engine` is the engine client of one process; `exchange` asks
our own ASGI app there; `pausing` holds requests back. `serve_app.llm_config` knows what a field of the config means.
"""

from serve_app.ray_llm.server import ChunkserveServer as ChunkserveServer
