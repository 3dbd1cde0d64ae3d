"""Bytes to callables: targets, the compiler and sessions. Imports neither torch nor torch-mlir."""
