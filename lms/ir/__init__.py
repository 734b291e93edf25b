"""A training step as values: ops, tensors, buffers and the plan for them; no TensorFlow."""
