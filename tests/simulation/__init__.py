"""Actors on virtual time: seeded schedules and stories."""
