"""What the package index has only as source, or not at all: built here."""
