"""The command line: options in, plans and receipts out."""
