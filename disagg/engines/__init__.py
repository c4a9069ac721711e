"""What moves a batch. Engines see addresses and lengths; they know no pool, no role, no request."""
