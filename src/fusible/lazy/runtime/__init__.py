"""Execution: host arrays in and out, and programs run by XLA through PJRT."""
