"""Serves OpenAI's and Anthropic's HTTP APIs on Ray Serve, in front of engine replicas.

Start with `app`, which a config names, and `replicas`, which run what it builds. A request enters by `edge`, becomes
token ids in `api`, waits at `admission`, is placed by `routing`, and gets its tokens by `channel`. `front` is the
commands `serve` and `chunkserve`. docs/explanation/packages.md draws which package imports which.

Importing this package imports nothing else.
"""
