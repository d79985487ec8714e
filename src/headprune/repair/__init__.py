"""Letting what stays take over what left: output projections solved again on calibration data."""
