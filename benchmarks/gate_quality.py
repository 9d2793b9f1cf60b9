"""Quality of the shipped gates, from the cross-validation that is stored with them.

    python benchmarks/gate_quality.py

AUC of P(known) for closed_book_correct, cross-validated by question; the mean is over the sets. `heads.py` and
`begun.py` train and measure again.
"""

from base import CONSOLE, SETS, argument_parser, print_table
from heads import show_metrics

from rgate_integrations.gates.folder import read_gate, shipped


def main() -> None:
    argument_parser(__doc__).parse_args()
    rows = []
    for name in shipped():
        saved = read_gate(name)
        metrics = saved.provenance["metrics"]
        aucs = [metrics["auc"].get(set_name, float("nan")) for set_name in SETS]
        values = [f"{value:.3f}" for value in (*aucs, metrics["auc_mean"], metrics["auc_pooled"])]
        reads = "question and draft" if getattr(saved, "tokens", 0) else "question"
        rows.append([name, saved.base_model, reads, *values])
    print_table(["gate", "proxy", "reads", *SETS, "mean", "pooled"], rows)
    for name in shipped():
        saved = read_gate(name)
        facts = saved.provenance
        CONSOLE.print(f"{name}: {facts['recipe']}; seed {facts['seed']}.")
        if "auc_requests" in facts["metrics"]:
            show_metrics(facts["metrics"], f"{name}, held out, threshold {saved.threshold:.2f}")


if __name__ == "__main__":
    main()
