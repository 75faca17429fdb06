"""The laboratory: looks at runs, and at rules without a policy. The package does not import it."""
