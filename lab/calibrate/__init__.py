"""Measure this machine or a cluster, and fit a calibration for predictions."""
