"""Whose knowledge is judged: from the name of an LLM, or a folder of ``rgate ability``, to its ability."""
