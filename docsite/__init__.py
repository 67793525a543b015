"""What the documentation site is made of besides its pages: generated references, the picture of a request's path,
and a MkDocs hook. `python -m docsite` writes every generated page.
Never needed to serve: nothing that is installed imports it."""
