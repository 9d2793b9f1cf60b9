"""The engine: one owner of models and queue, from questions to decisions."""
