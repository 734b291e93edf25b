"""Subcommands about lmsrun itself, and those that only lmsrun starts."""
