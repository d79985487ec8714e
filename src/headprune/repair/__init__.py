"""Refits the output projections of what stays on calibration data: least squares, a scale, or a mean."""
