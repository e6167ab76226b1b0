"""Trace operations, one file each, with the function that records exactly one of them beside it; and functions that compose several."""
