"""The endpoints of the other side: handshakes, signs of life, loss and return."""
