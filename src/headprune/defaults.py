"""What is done where nothing is said: the same in Python and on the command line."""

# What measured best over models of text, images and language together: docs/repair.md.
CRITERION = "residual-gradient"
# What does best where heads and neurons compete for a budget: docs/budgets.md.
BUDGET_CRITERION = "elimination"
COMPENSATION = "lstsq"
