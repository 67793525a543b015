"""Turns failures into responses: `api_error` gives each a status and a code, and `refusal` writes the response.

Never shows a client the server's internals.
"""
