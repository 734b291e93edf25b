"""Where options come from, beside the command line and the environment."""
