"""Measure how long the ops of a step take, and keep these times."""
