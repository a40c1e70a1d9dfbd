"""Tests of the device worker's torch side."""
