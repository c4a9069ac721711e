"""What this host's kernel says: who is at the other end of a socket, who may have written a file,
and that this process is a fork.
"""
