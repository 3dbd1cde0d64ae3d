"""What MLIR is told about: the one place that makes contexts and registers dialects."""
