"""What is checked of a call, and its shape rules: one file a category, named as in ``fusible.tex.interface``, beside the checks that they share."""
