"""Models of time, of memory and of TensorFlow's allocator; no TensorFlow."""
