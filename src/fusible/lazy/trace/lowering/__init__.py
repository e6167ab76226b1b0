"""FlatIR subgraphs that several trace operations lower to."""
