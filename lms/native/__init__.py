"""Compile and load the C and C++ parts."""
