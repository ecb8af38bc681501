"""Predict the time of a step: event model, compute model and the file of a calibration.

Plain arithmetic, no torch.
"""
