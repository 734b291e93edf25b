"""Turn the graph that TensorFlow is about to run into the edited one."""
