"""The variables that steps use: their handles, memory of their own, and values in host memory."""
