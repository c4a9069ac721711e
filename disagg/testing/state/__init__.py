"""The state in the memory of serving engines: read by plugins that they load, and compared."""
