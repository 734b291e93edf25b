"""Hand the graphs that TensorFlow's own optimizer has finished to an editor in Python."""
