"""Values as text and JSON."""
