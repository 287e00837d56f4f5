"""Measurement: timers, records, suites."""
