"""Objects read into pools, and written from them."""
