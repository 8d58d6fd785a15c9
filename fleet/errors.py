"""What can go wrong with a fleet; every text says what to do about it."""

from __future__ import annotations


class FleetError(Exception):
    """The fleet cannot do what it was asked for."""


class FleetFileError(FleetError):
    """The fleet's file cannot be read, or asks for something that cannot be."""
