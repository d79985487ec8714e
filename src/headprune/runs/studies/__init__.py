"""Many runs: criteria, seeds, budgets, models and data sets, planned at once, and run one after the other or on Ray."""
