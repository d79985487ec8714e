"""From scores and a budget to the next removals, step by step."""
