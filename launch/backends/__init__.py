"""One small module per launcher: each turns a plan into the commands that start it."""
