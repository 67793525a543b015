"""OpenTelemetry spans of the requests for generated text, and where they are sent.

`export` sends them, `spans` makes one of a request that is over, and `attributes` fills it.

Never imports OpenTelemetry unless `tracing.exporter` asks for it: `export` does, and only when it is called.
"""
