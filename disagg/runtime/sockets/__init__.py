"""Stream sockets: their addresses, who listens, and messages as frames of a stream."""
