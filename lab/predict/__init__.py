"""Predict the step time of each strategy on nodes that nobody has."""
