"""The report of a job: what its run folder holds, read and written as one page."""
