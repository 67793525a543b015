"""Stands for the package of that name; see protocol.py."""
