"""Owns load tests of servers that speak OpenAI's streaming API; `results/` keeps what they measured.
Never imports the packages it measures: what is served is reached by HTTP, as a client would."""
