"""Contracts of the project, mirrored to the source tree."""
