"""Images that requests bring: where they come from, what they may be, and the pixels that an engine takes.

`intake` is the entry; `data_url` and `fetch` get a file, and `pixels` decodes and scales it.

Never knows a model but by the kind of input that it declares.
"""
