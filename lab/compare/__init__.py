"""Compare strategies: plan cells, run them, read their results."""
