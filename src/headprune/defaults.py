"""What is used where an option is not given, the same in Python and on the command line."""

# What measured best over models of text, images and language together: docs/repair.md.
CRITERION = "residual-gradient"
# What does best where heads and neurons compete for a budget: docs/budgets.md.
BUDGET_CRITERION = "elimination"
# The same without a backward pass, for the layer-wise schedule: as ZipLM and OSSCAR order units, with their damping.
LAYERWISE_CRITERION = "elimination(metric=output,ridge=0.01)"
REPAIR = "lstsq"
BUDGET_REPAIR = "dense"
# Rows to score and repair on. Of data that evaluates as well, these are the share, but no fewer than the second number,
# no more than the first, and never more than half.
CALIBRATION_SAMPLES = 256
FEW_CALIBRATION_SAMPLES = 128
CALIBRATION_SHARE = 0.3
COMPARED_AT = (0.25, 0.5, 0.75)  # shares of heads removed at which curves are compared
ROUNDS = 6  # in which a budget is reached
WIDTHS = "global"  # how sites share it
