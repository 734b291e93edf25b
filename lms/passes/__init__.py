"""The passes over a graph that TensorFlow is about to run."""
