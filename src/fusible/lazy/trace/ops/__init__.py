"""Trace operations, one file each, with the frontend functions that record exactly one of them beside it."""
