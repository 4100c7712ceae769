"""Performing effects: one module for each kind of store."""
