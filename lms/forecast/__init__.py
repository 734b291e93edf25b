"""Forecast a step on devices from one trace; no TensorFlow."""
