"""What each optimiser gets, and what each rank computed for it: gradients, weights, updates."""
