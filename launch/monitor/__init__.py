"""Running jobs of this user on this host, looked at from outside: what `lmsrun top` shows."""
