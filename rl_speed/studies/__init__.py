"""What looks at runs, and at rules without a policy: comparison, simulation, benchmark, inspection.

Nothing else imports it.
"""
