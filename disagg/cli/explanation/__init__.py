"""What `kvpool explain` reads, computes and draws: the ranks of both sides, and what travels."""
