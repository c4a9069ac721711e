"""What this host's kernel says of sockets, files, memory and this process."""
