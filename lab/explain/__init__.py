"""Find known errors in the output of ranks."""
