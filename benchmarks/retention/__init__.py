"""The study of what a tier keeps: loads with shared prefixes, simulated caches, and what knowing the future would give."""
