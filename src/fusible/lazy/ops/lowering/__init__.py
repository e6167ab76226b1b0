"""FlatIR subgraphs that several operations lower to."""
