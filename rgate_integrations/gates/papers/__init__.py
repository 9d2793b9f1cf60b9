"""The gates of four papers (IK score, SlimPLM, ADAPT-LLM, KBM), and the baselines that they compare with."""
