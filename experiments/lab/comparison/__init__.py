"""Several methods from one start: run them, tabulate the time to a target,
compare with theory, draw.
"""
