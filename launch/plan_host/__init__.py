"""Machine and settings to the plan of one host; pure, touches no machine."""
