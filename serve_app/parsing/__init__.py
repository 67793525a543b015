"""What a model's text means besides its letters: reasoning and tool calls, as parsers fed with pieces of text.

`tools` and `reasoning_parsers` list the parsers by name, and `choice` picks one. All of them share `tool_parser` and
`cursor`. `call_grammars` lists the grammars that make a model write what its parser reads.

Never sees tokens, requests or HTTP, and never depends on how the text was cut into pieces.
"""
