"""The order in which the ops of a step run; no TensorFlow."""
