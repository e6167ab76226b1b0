"""What is the same of a call for every backend: checks of arguments, shape rules, and steps that backends share (seeds, writes that happen together).
One file a category, named as in ``fusible.tex.interface``; beside them what all categories use."""
