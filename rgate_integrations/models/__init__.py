"""Proxy models: small local models that draft, sample and judge."""
