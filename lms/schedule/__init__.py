"""In which order the ops of a step run; no TensorFlow."""
