"""What turns an endpoint, and who waits for a turn."""
