"""Writes a plan into the graph that TensorFlow is about to run, and checks what came out."""
