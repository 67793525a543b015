"""Measures a whole server while something happens to it: the killed engines of `moves`.

Never imports a server that it measures.
"""
