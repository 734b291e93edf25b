"""Compiles and loads the C and C++ parts."""
