"""What runs a hand-off: sockets, threads, clocks and reads."""
