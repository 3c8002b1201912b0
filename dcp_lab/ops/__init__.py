"""Public operations: validate, plan, launch."""
