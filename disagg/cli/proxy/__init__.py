"""`kvpool proxy`: one address in front of prefill and decode servers, for trying."""
