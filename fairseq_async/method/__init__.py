"""A run's method: its typed description, the registry of rules, and flags made from options."""
