"""Leaves that everything else may use."""
