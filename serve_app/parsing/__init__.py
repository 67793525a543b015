"""Parses reasoning and tool calls in a model's text, which arrives in pieces.

`tools` and `reasoning_parsers` list the parsers by name, and `choice` picks one. All tool parsers share `tool_parser`
and `cursor`. `call_grammars` lists the grammars that make a model write what its parser reads.

Never sees tokens, requests or HTTP, and never depends on how the text was cut into pieces.
"""
