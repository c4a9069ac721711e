"""Where objects lie: floors, by URL."""
