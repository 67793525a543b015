"""Serves OpenAI's and Anthropic's APIs as one ASGI app, from a request's bytes to its answer's frames.

Start with `ingress`, which has the routes. A body is read by a schema in `requests`, becomes a prompt by `text`, and is
answered by `generation`; `models` has what belongs to each served model, and finds the one that is meant. `openai` and
`anthropic` write the answer in their APIs' forms, and `openapi` documents them. `http` has what every route needs.
`measuring` counts requests, and `request_facts` holds what is known of one.

Never knows Ray, nor how an engine is reached.
"""
