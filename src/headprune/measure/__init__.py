"""What a model is worth and what it costs: metrics with intervals, agreement, parameters, FLOPs, memory, time."""
