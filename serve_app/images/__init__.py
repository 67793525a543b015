"""Reads the images of requests: fetches them, checks them, and makes the pixels that an engine takes.

Start with `intake`. `data_url` and `fetch` get a file, and `pixels` decodes and scales it.

Knows nothing of a model except the kind of input that it declares.
"""
