"""Estimates of prompts' pass rates, and sampling budgets from them. See README.md."""
