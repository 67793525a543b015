"""The OpenAPI document: every operation with its fields and answers, and the routes that show it.

`operations` lists what there is, `document` writes it, `docs_page` shows it as HTML, and `about` serves both.
"""
