"""Serves OpenAI's API: chat, completions and embeddings, whole and streamed; `responses` has its later Responses API.

`forms` chooses the answer's shape for a body, `choices` is the stream of all answers to one request, `response` writes
JSON, and `sse` streams it. `answer_schema` documents the answers. vLLM's `/tokenize` is in `text_routes`.
"""
