"""From prompts to scored groups: generation calls, the driver between them,
what is in flight and what waits, estimates, budgets.
"""
