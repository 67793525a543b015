"""Owns what a request meets before the app: the limits of HAProxy and of the HTTP servers, and what these answer.
Never imports the app, nor anything that is slow to import: HAProxy's launcher runs at every reload."""
