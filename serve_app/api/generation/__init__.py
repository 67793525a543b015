"""Generates one answer, whatever the API: turns a request's fields into an engine's submission, and its tokens to text.

`submission` prepares the request: its prompt, images and the grammar of its answer (`constraint`, `field_grammars`,
`tool_grammars`), within the limits on what many answers bring together (`answer_limits`). `completion` reads the
engine's events. `chat_reader` separates thoughts and tool calls from content, and `blocks` yields them in order;
`answer_readers` makes what reads the answer beside it. `sealing` encrypts thoughts that a client keeps and does not
read. `live` ends requests that are late or aborted.
"""
