"""The engine: owns models and queue, and turns questions into decisions."""
