"""Schedules: which units are removed in each step."""
