"""The third IR: a StableHLO module, built through jaxlib's MLIR bindings."""
