"""One answer, in no API's words: from a request's fields to what an engine takes, and from its tokens to text.

`submission` prepares the request: its prompt, images and the grammar of its answer (`constraint`, `field_grammars`,
`tool_grammars`). `completion` reads the engine's events; `chat_reader` tells thoughts and tool calls from content, and
`blocks` gives them in order. `live` ends requests that are late or aborted.
"""
