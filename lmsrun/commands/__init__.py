"""One file per subcommand: ``USAGE``, ``ABOUT`` and ``EXAMPLES`` for its help, and ``main``."""
