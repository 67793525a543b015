"""What a request meets before the app: the limits of HAProxy and of the HTTP servers, and what these answer.

`limits` has the numbers, `haproxy_config` and `http_protocol` enforce them, and `guard` is the outermost ASGI layer.
`cors` has the web pages that may read what these answer.

Never imports the app, nor anything that is slow to import: HAProxy's launcher runs at every reload.
"""
