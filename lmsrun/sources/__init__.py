"""Where options come from: the command line, the environment, TOML files; and all of these together."""
