"""Tests, by floor; contract suites, simulation, faults and end-to-end runs beside them."""
