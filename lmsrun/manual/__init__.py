"""What the subcommands take, as one value, and what is made of it: completion of shells, man pages."""
