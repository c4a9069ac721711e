"""State written once, read by any engine."""
