"""IBM's names in TensorFlow's own modules."""
