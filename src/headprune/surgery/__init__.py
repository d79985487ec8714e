"""Removes units from the weights, verifies on a batch that the result equals gating them, and undoes failures."""
