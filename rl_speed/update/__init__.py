"""Turns groups into gradient steps: batches, pools, reward shaping, the jitted update with its
state and optimizer, and the reference policy.
"""
