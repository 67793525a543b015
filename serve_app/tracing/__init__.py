"""Owns OpenTelemetry spans of the requests for generated text, and where they are sent.
Never imports OpenTelemetry unless `tracing.exporter` asks for it: `export` does, and only when it is called."""
