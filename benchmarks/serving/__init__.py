"""Measures a whole server while something happens to it: the killed engines of `killed`.

Never imports a server that it measures.
"""
