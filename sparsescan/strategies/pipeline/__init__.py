"""Pipelines with stale weights (Zhang and Abdelrahman, 2021), and with micro-batches."""
