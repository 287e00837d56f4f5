"""Measurement: cases and suites of them, peers, timers, energy, records, the masked twin."""

from .energy import EnergyMeter

__all__ = ["EnergyMeter"]
