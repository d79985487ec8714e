"""Figures, tables, pages and model cards about runs."""
