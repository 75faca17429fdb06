"""From groups to a gradient step: batches, pools, shaping, the jitted update,
its state and optimizer, the reference policy.
"""
