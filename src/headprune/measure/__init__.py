"""What a model is worth and what it costs: metrics with their intervals, size, FLOPs, time."""
