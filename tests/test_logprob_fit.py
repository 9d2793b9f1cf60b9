"""The head for log-probabilities is fitted the way it is used: with the question, weighted by its kind."""

import numpy as np
import pytest

from rgate_integrations.gates.artifacts import LogprobHead

fits = pytest.importorskip("logprobs")

HEAD = LogprobHead(text=0.5, total=0.1, least=1.2, mean=2.0, bias=3.0)


def drawn(head, n):
    """Answers of one length, right as often as the gate with this head says."""
    rng = np.random.default_rng(0)
    features = np.zeros((n, 4, 4))
    features[:] = (rng.normal(size=(n, 4)) * fits.SCALES - [0, 10, 3, 1])[:, None]
    question = fits.QuestionScores(rng.normal(size=n) * 1.5, rng.uniform(0.5, 1, n))
    logit = fits.combine_log_odds(question, fits.score_features(head, features))[:, 0]
    return features, question, (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(float)


def test_the_head_is_found_again():
    found = fits.fit_head(*drawn(HEAD, 40_000))
    for name, reach in {"text": 0.1, "total": 0.02, "least": 0.1, "mean": 0.3, "bias": 0.4}.items():
        assert getattr(found, name) == pytest.approx(getattr(HEAD, name), abs=reach)


def test_a_rarer_token_never_speaks_for_knowledge():
    strange = LogprobHead(text=1.0, total=-0.2, least=1.0, mean=-2.0, bias=0.0)
    found = fits.fit_head(*drawn(strange, 4_000))
    assert (found.total, found.mean) == (0.0, 0.0)
    assert found.least > 0


def test_what_is_fitted_is_what_the_gate_computes():
    logprobs = [[-0.1, -0.5, -30.0], [-2.0] * 20, [-0.01]]
    words = np.array([[0.3, 0.4, 0.5, 0.6]] * 3)
    found = fits.score_features(HEAD, fits.build_features(logprobs, words))
    for row, values in enumerate(logprobs):
        for place, cut in enumerate(fits.CUTS):
            assert found[row, place] == pytest.approx(HEAD.logit(words[row, place], values[:cut]))
