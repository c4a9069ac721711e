"""The event loop of an endpoint, its thread, and those that wait for a turn."""
