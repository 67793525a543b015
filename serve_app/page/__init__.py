"""The page at `/`: a playground, and a live view of the replicas. HTML, CSS and JavaScript as they are served."""
