"""From the graph that TensorFlow is about to run to the edited one."""
