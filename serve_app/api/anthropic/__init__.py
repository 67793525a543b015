"""Serves Anthropic's API: turns its requests into chat requests, and writes its form of answers, whole and streamed.

Start with `conversation`, which turns a message request into a chat, and `form`, which turns the answer back. `schema`
has the request's fields, `blocks` and `read_blocks` the contents of a message, `tools` the tools, and `frames` the
events of a stream.

Never asks an engine in a way of its own: a message request is served as a chat.
"""
