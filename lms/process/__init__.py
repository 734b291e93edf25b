"""Hold what an engine uses of its process, and the records of what it did there."""
