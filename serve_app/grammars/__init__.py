"""What an answer's text may be, written in llguidance's notation: JSON schemas, regexes, choices, grammars, tags.

`texts` takes what clients write, and `json_schema` and `tags` their structures. `notation` joins grammars, and `nested`
and `regular` rewrite those that stand inside a call. `check` asks llguidance whether it takes the result.

Never knows requests, models or HTTP, and never runs a grammar: engines do.
"""
