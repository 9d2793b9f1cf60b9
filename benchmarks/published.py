"""Estimates abilities from published figures of LLMs, by regression on abilities from recorded answers."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
from labels import TABLE_NAMES

from rgate_integrations.gates.llm_names import parse_name

MIN_RESIDUAL = 0.4
RECALL, PROXIES = ("simpleqa", "triviaqa", "nq"), ("mmlu", "params_b")
"""Benchmarks of factual knowledge, and figures that correlate with it."""
COLUMNS = (*RECALL, *PROXIES)
LOGITS = (1.0, 0.25)
"""Prior mean and standard deviation of a line's slope. In the one-parameter model the log-odds of an accuracy grow by
one for each logit of ability."""
SLOPES = {"params_b": (0.33, 0.1)}
"""The same for the base-2 logarithm of the parameters: about one logit for ten times as many."""
SIZES = {
    "Llama-2-7B-chat": 7.0,
    "Meta-Llama-3.1-8B": 8.0,
    "Mistral-7B-Instruct-v0.2": 7.2,
    "Mistral-7B-Instruct-v0.3": 7.2,
    "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Phi-3-small-128k-instruct": 7.4,
    "Qwen3-8B": 8.2,
    "gemma-2b-it": 2.5,
    "llama2-13b-base": 13.0,
    "llama2-13b-chat": 13.0,
    "llama2-70b-base": 70.0,
    "llama2-70b-chat": 70.0,
    "llama2-7b-base": 7.0,
    "mistral-7B": 7.2,
    "mistral-7b-chat": 7.2,
    "text-davinci-003": 175.0,
}
"""Billions of parameters of LLMs that the table of published figures lacks."""
EPOCH = "https://epoch.ai/benchmarks (Epoch AI, CC BY 4.0)"
EPOCH_NAMES = {
    "deepseek-reasoner": "deepseek-v3.2",  # that of December 2025
    "deepseek-v2": "deepseek-v2 (base)",
    "deepseek-v3": "deepseek-v3 (base)",
    "gemma-2b": "gemma-2b-it",
    "gpt-3.5-turbo-1106": "gpt-3.5-turbo-0125",
    "kimi-k2-thinking-turbo": "kimi-k2-thinking",
    "kimi-k2p5": "kimi-k2.5",
    "llama-2-70b-hf": "llama-2-70b",
    "llama-2-7b": "Llama-2-7B-chat",
    "llama-3.1-405b": "llama-3.1-405b (base)",
    "meta-llama-3-8b-instruct": "llama-3-8b-instruct",
    "mixtral-8x7b-v0.1": "Mixtral-8x7B-Instruct-v0.1",
    "o3-2025-04-16": "o3",
    "o3-mini-2025-01-31": "o3-mini",
    "o4-mini-2025-04-16": "o4-mini",
    "qwen2.5-72b": "qwen2.5-72b (base)",
}
"""Epoch's names of LLMs, mapped to the names here; a base model stands for a chat model with recorded answers."""


class Published:
    """Published figures of LLMs, and the abilities that they predict.

    Accuracies become log-odds and numbers of parameters become logarithms, so that lines fit. Each figure has its own
    line, fitted to the LLMs with both that figure and labels. The lines are weighted by their leave-one-out errors.
    SimpleQA Verified is first mapped to SimpleQA's scale, by a line through the LLMs that have both.
    """

    def __init__(self, folder: Path) -> None:
        table = pd.read_csv(folder / "abilities.csv", index_col="llm")
        # SimpleQA Verified and the Wikipedia part of TriviaQA are different sets.
        table.loc[table.notes.str.contains("Verified|contamination", na=False), "simpleqa"] = math.nan
        table.loc[table.notes.str.contains("TriviaQA-Wiki", na=False), "triviaqa"] = math.nan
        # GPT-5's SimpleQA figure is published for its thinking mode, which is the same LLM.
        table.loc["gpt-5-2025-08-07", "simpleqa"] = table.simpleqa["gpt-5-thinking"]
        table = table.drop(index="gpt-5-thinking")
        verified, triviaqa = read_verified(folder), read_triviaqa(folder)
        table = table.reindex(table.index.union(verified.index.union(triviaqa.index), sort=False))
        table = _drop_base(table)
        self.urls = table.source_url.where(table[[*COLUMNS]].notna().any(axis=1), "").fillna("")
        table["triviaqa"] = table.triviaqa.fillna(triviaqa)
        for name in table.index.intersection(verified.index.union(triviaqa.index)):
            self.urls[name] = ", ".join(filter(None, (self.urls[name], EPOCH)))
        sizes = pd.Series(SIZES).reindex(table.index)
        self.figures = table[[*COLUMNS]].astype(float)
        self.figures["params_b"] = np.log2(self.figures.params_b.fillna(sizes))
        for column in (*RECALL, "mmlu"):
            self.figures[column] = _log_odds(self.figures[column])
        self.figures["link_error"] = 0.0
        self._link(_log_odds(verified).reindex(table.index))

    def _link(self, verified: pd.Series) -> None:
        """Map SimpleQA Verified to SimpleQA's scale; an LLM with both gets their mean."""
        simpleqa = self.figures.simpleqa.copy()
        both = (simpleqa.notna() & verified.notna()).to_numpy()
        x, y = verified[both].to_numpy(), simpleqa[both].to_numpy()
        for name, figure in verified.dropna().items():
            linked, error = _fit_line(x, y, figure, LOGITS)
            direct = simpleqa[name]
            figures = [linked] if math.isnan(direct) else [linked, direct]
            self.figures.loc[name, "simpleqa"] = np.mean(figures)
            self.figures.loc[name, "link_error"] = error / len(figures)

    def get_figures(self, llm: str) -> pd.Series:
        """Return the figures of an LLM by its name in the labels; NaN for missing ones."""
        name = TABLE_NAMES.get(llm, llm)
        if name in self.figures.index:
            return self.figures.loc[name]
        figures = pd.Series(math.nan, index=self.figures.columns)
        figures["params_b"] = math.log2(SIZES.get(llm, math.nan))
        return figures

    def estimate(
        self, figures: pd.Series, measured: dict[str, float], without: str = ""
    ) -> tuple[float, float, str]:
        """Return mean and standard deviation of the ability that figures predict, and the names of these figures."""
        compared = [llm for llm in measured if llm != without]
        thetas = np.array([measured[llm] for llm in compared])
        table = pd.DataFrame([self.get_figures(llm) for llm in compared])
        estimates = {}
        for column in COLUMNS:
            both = table[column].notna().to_numpy()
            if both.sum() >= 3 and not math.isnan(figures[column]):
                slope = SLOPES.get(column, LOGITS)
                mean, sd = _fit_line(table[column].to_numpy()[both], thetas[both], figures[column], slope)
                estimates[column] = mean, math.hypot(sd, figures.link_error if column == "simpleqa" else 0.0)
        # Measured figures say more than size. One party asked all LLMs the questions of SimpleQA Verified, so with it
        # only recall counts: MMLU is near its ceiling for most of these LLMs.
        if figures.link_error > 0:
            estimates = {column: estimate for column, estimate in estimates.items() if column in RECALL}
        elif len(estimates) > 1:
            estimates.pop("params_b", None)
        if not estimates:
            return 0.0, 1.0, ""
        means, sds = np.array(list(estimates.values())).T
        precisions = 1 / sds**2
        # Their errors correlate, so two figures say less than two independent ones.
        sd = max(math.sqrt(2 / (1 + len(estimates)) * len(estimates) / precisions.sum()), MIN_RESIDUAL)
        names = ", ".join(estimates)
        if figures.link_error > 0:
            names = names.replace("simpleqa", "simpleqa (verified)")
        return float(means @ precisions / precisions.sum()), sd, names


def read_verified(folder: Path) -> pd.Series:
    """Return SimpleQA Verified in percent by LLM: the lowest score over its reasoning efforts."""
    runs = pd.read_csv(folder / "simpleqa_verified_epoch.csv")
    names = runs.llm.str.split("_").str[0].replace(EPOCH_NAMES)
    return runs.groupby(names).simpleqa_verified.min()


def read_triviaqa(folder: Path) -> pd.Series:
    """Return TriviaQA in percent by LLM: the median over sources, five-shot if any source is."""
    runs = pd.read_csv(folder / "triviaqa_epoch.csv")
    names = runs.llm.str.strip().replace(EPOCH_NAMES)
    has_five_shot = (runs.shots == "5").groupby(names).transform("any")
    usual = (runs.shots == "5") | ~has_five_shot
    return runs[usual].groupby(names).triviaqa_em.median()


def _drop_base(table: pd.DataFrame) -> pd.DataFrame:
    """Drop base models that have a chat model: names rarely distinguish them, and chat models are what answers."""
    names = {llm: parse_name(llm) for llm in table.index}
    bases = [llm for llm in names if "base" in llm]
    chat = {name.words for llm, name in names.items() if llm not in bases}
    return table.drop(index=[base for base in bases if names[base].words in chat])


def _log_odds(percent: pd.Series) -> pd.Series:
    share = percent / 100
    return np.log(share / (1 - share))


def _fit_line(x: np.ndarray, y: np.ndarray, at: float, slope: tuple[float, float]) -> tuple[float, float]:
    """Return a line's prediction at a point and its error: leave-one-out, and larger outside the data."""
    mean, sd = slope
    design = np.stack([np.ones(len(x)), x - x.mean()], axis=1)
    gram = design.T @ design + np.diag([0.0, (MIN_RESIDUAL / sd) ** 2])
    rest = y - mean * design[:, 1]
    coefficients = np.linalg.solve(gram, design.T @ rest)
    leverage = np.einsum("ni,ij,nj->n", design, np.linalg.inv(gram), design)
    residuals = (rest - design @ coefficients) / (1 - leverage)
    error = max(math.sqrt(np.mean(residuals**2)), MIN_RESIDUAL)
    point = np.array([1.0, at - x.mean()])
    spread = math.sqrt(1 + point @ np.linalg.solve(gram, point))
    return float(point @ coefficients + mean * point[1]), error * spread
