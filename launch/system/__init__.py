"""One primitive of Linux or POSIX per file."""
