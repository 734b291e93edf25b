"""Hook into calls of TensorFlow and Keras, for what no graph tells."""
