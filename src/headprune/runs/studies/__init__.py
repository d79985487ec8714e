"""Studies: runs of many criteria, seeds, budgets, models and data sets, one after the other or on Ray."""
