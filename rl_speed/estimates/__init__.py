"""Estimates of pass rates, and budgets from them. See README.md."""
