"""Probes of what is installed: binding tools, MPI, Horovod."""
