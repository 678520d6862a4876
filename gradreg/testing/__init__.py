"""Helpers for tests: the naive truth to compare with, and a zoo of awkward models to compare on."""
