"""What an engine says of itself, so that another knows whether they can work together."""
