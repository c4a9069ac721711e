"""What a store holds, and how it is kept: lists, prefix trees, checks, deletion, comparison."""
