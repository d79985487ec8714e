"""Figures, tables and pages about runs."""
