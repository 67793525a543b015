"""Serves what every HTTP route needs, whatever its API: bodies, headers, disconnects, long work, and CORS.

Start with `asgi`, which stands between a route and the server. `body_pace` and `keep_alive` watch connections,
`offload` and `json_text` keep long work off the event loop, and `generation_response` and `load_report` add headers.

Knows no model and no API.
"""
