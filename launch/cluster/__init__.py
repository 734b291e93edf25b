"""Hosts, allocations, and the plan of a job over several hosts."""
