"""Write a plan into the graph that TensorFlow is about to run, and check the result."""
