"""Large Model Support on stock TensorFlow. Importing this package imports no TensorFlow."""
