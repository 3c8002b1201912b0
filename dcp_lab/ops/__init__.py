"""Public operations: validate, plan, launch."""

# First of all: it decides whether Triton interprets or compiles, which triton reads when imported.
import dcp_lab.kernels  # noqa: F401
