"""From groups to a gradient step: batches, pools, reward shaping, the jitted update, its state and
optimizer, the reference policy.
"""
