"""Writes the OpenAPI document, every operation with its fields and answers, and serves the routes that show it.

`operations` lists the operations, `document` writes them, `docs_page` shows them as HTML, and `about` serves both.
"""
