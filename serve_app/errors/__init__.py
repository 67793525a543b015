"""How a failure reaches a client: `api_error` gives it a status and a code, `refusal` writes the response.

Never shows a client what is inside the server.
"""
