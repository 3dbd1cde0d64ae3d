"""torch to MLIR: capture, import, fallback by operator, and calling what was compiled."""
