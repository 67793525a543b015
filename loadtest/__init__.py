"""Owns load tests of servers that speak OpenAI's streaming API; `results/` keeps what they measured.
Never imports the packages it measures: it talks to a server by HTTP, as a client does."""
