"""Predict the step time of each strategy on numbers of nodes that you do not have."""
