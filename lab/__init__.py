"""What compares: starts the parts as a student would, and sets their results side by side."""
