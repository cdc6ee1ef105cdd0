"""Trainers of others, with the real packages."""
