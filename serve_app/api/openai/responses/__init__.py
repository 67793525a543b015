"""OpenAI's Responses API without its memory: its requests as chat requests, its form of answers.

Start with `conversation`, which turns a request into a chat, and `form`, which turns the answer back. `items` and
`turns` read the input, `toolbox` presents its tools to the model, and `frames` are the events of a stream.

Never keeps a response: each request carries the whole conversation.
"""
