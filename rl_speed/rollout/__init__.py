"""From prompts to scored groups: generation calls, host driver, prompts in flight, the sampling
buffer, estimates, budgets.
"""
