"""What a hand-off takes beyond its bytes, by model family, size and engine."""
