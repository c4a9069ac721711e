"""The kit's checks, by what they are of; `kvpool.testing.run` runs them."""
