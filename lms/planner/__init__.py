"""From a step to its memory plan; no TensorFlow."""
