"""Read the graph that TensorFlow is about to run into a step of plain values."""
