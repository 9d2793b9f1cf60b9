"""The engine, which owns the models and the queue, and turns questions into decisions."""
