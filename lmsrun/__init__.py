"""The command line: options in, plans and receipts out."""

__version__ = "0.1.0"
