"""Trace operations, one file each, with the function that records one of them; and functions that compose several."""
