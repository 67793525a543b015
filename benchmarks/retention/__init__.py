"""The study of what a tier keeps: loads with shared prefixes, simulated caches, and one that knows the future."""
