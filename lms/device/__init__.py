"""The device whose memory is planned: its limit, its allocator, its link, its counters."""
