"""The way between the supervisor of a job and ranks that another launcher has started."""
