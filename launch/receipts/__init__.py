"""What a rank reports, and how it is judged."""
