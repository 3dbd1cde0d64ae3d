"""MLIR to MLIR: passes, the pipelines made of them and the manager that runs them."""
