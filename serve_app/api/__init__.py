"""Owns what clients speak: OpenAI's API as an ASGI app, from the bytes of a request to the frames of its answer.
Never knows Ray, nor how an engine is reached."""
