"""Run directories: journals that survive a kill, experiments that fill them, comparisons of several."""
