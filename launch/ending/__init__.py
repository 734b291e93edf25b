"""How a job ends, decided without touching a process."""
