"""What a machine keeps of all its rooms together."""
