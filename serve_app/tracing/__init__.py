"""Makes OpenTelemetry spans of the requests for generated text, and sends them.

`export` sends spans, `spans` makes one for a request that is over, and `attributes` fills it.

Never imports OpenTelemetry unless `tracing.exporter` asks for it: `export` does, and only when it is called.
"""
