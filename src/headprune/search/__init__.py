"""From scores and a budget to the next removals: schedules, budgets, stopping rules, and the loop that applies them.

`config.py` declares all options, `schedules/` yield removals, `pruner.py` applies, measures and records them."""
