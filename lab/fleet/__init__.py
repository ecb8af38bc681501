"""What launchers share: enter namespaces, supervise a rank, show its output, say how it ended."""
