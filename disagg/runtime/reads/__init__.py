"""What decode reads, by rank: reads that have begun, and peers that are given up."""
