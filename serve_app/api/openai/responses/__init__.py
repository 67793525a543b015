"""OpenAI's Responses API: its requests as chat requests, its form of answers, and answers that later requests refer to.

Start with `form`, which reads a request and has its answer: `earlier` finds what it continues, `conversation` turns it
into a chat, and `keeping` keeps the answer. `items` and `turns` read the input, `toolbox` presents its tools to the
model, and `frames` has the events of a stream. `kept_routes` has the routes to kept answers.

Never keeps an answer itself, nor decides for how long: `serve_app.store` does.
"""
