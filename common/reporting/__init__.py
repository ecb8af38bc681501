"""What a run writes and prints. Nothing here decides anything."""
