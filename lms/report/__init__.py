"""Report what was done, as values, text, picture and CSV."""
