"""Which items hold the state of which prefixes of tokens: keys, an index, events. No torch."""
