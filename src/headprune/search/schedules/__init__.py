"""Schedules: what leaves a model, step after step."""
