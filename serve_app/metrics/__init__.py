"""What the replicas measure, and how one of them answers a scrape for all."""
