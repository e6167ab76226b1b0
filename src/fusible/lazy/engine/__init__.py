"""Execution: host arrays in and out, and programs compiled and run by XLA through PJRT, or by IREE."""
