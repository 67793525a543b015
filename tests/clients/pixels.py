"""Owns a picture that is small enough to be kept in a recording. Never imports anything."""

PIXELS = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAIAQAAAADsdIMmAAAADUlEQVR42mP4z8SADAEPcQEOdvOI0AAAAABJRU5ErkJggg=="
"""The picture: a PNG, in base64."""
