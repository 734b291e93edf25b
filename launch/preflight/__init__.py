"""The hosts before a job: asked, answering, and what the answers mean for it."""
