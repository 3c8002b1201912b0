"""Measuring: timers, byte and latency formulas, hardware figures, and the rows that are kept."""
