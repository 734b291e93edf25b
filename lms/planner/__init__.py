"""Plan the memory of a step; no TensorFlow."""
