"""Serves the page at `/`: a playground, and a live view of the replicas. Its HTML, CSS and JavaScript are here, too."""
