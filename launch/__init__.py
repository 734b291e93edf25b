"""Placement, binding and supervision of ranks; knows machines and processes, never TensorFlow."""
