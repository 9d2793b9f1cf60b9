"""The engine, which loads gates, runs them on models, and turns questions into decisions."""
