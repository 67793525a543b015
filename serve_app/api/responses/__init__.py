"""Owns OpenAI's Responses API without its memory: its requests as conversations, its form of answers.
Never keeps a response: each request carries the whole conversation."""
