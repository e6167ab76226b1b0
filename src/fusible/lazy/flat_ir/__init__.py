"""The second IR: operations 1:1 with StableHLO's, still bound to the operations and lines that they came from."""
