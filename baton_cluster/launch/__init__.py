"""Starts the processes of a cluster on one machine and supervises them; what every child process does."""
