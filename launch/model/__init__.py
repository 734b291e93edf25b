"""Frozen values and the options that shape a plan; imports nothing of the other folders."""
