"""Training: examples and labels from recorded answers, the linear probe, and the artefacts that are saved."""
