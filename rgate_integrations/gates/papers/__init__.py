"""The gates of the four papers, and the baselines that they compare with."""
