"""Registrations in Redis: where the processes of a cluster say that they are."""
