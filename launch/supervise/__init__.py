"""Start the ranks of a job, carry their output, end it, leave nothing behind."""
