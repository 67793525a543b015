"""Puts this project's engine and API behind the ingress of Ray Serve LLM, as the `server_cls` of an `LLMConfig`.

`server` has the class, and `reading` takes the config. `local_engine` is the engine client of one process, `exchange`
asks our own ASGI app there, and `answers` makes Ray's objects of its answers. `pausing` holds requests back.
"""

from serve_app.ray_llm.server import ChunkserveServer as ChunkserveServer
