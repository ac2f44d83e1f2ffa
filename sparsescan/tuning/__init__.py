"""Measurements that need whole plans."""
