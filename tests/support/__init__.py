"""What several tests share; no tests here."""
