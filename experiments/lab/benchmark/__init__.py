"""Measurements of our own code against named references, taken in the same run."""
