"""OpenAI's API: answers as chat, completions and embeddings, whole and streamed; `responses` is their later API.

`forms` joins a body to the answer's shape, `choices` is the stream of all answers to one request, `response` writes
JSON, and `sse` streams it. `answer_schema` documents the answers. vLLM's `/tokenize` is in `text_routes`.
"""
