"""Owns Anthropic's API: its requests as conversations, and its form of answers, whole and streamed.
Never asks an engine in a way of its own: a message is a chat in other words."""
