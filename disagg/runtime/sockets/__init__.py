"""Stream sockets: their addresses, listeners, and messages as frames of a stream."""
