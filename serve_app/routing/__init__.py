"""Owns which engine replica a call goes to: by cached prefix, session and load.
Never waits for another process while it decides."""
