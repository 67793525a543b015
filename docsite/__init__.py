"""Owns the code behind the documentation site: generated references, the picture of a request's path, and a MkDocs
hook. `python -m docsite` writes every generated page. Never needed to serve: no installed code imports it."""
