"""``python -m bench --plot``: time and memory of ``logprobs`` against the vocabulary."""

from __future__ import annotations

from pathlib import Path

from bench.measure.cases import Case, Run
from bench.measure.ops import COMPILED, GATHER, LOSS_PARALLEL, NAIVE, OURS
from bench.measure.process import MIB, Result, measure

__all__ = ["plot"]

VOCABULARIES = {"cpu": [8016, 16032, 32064, 64128, 128256], "cuda": [16032, 32064, 64128, 128256]}
ROWS = {"cpu": 512, "cuda": 8192}
ROUNDS = 5
PROVIDERS = {1: (OURS, NAIVE, NAIVE + COMPILED), 2: (OURS, GATHER, LOSS_PARALLEL)}
STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart.
    OURS: ("#0072b2", "o", "-"),
    NAIVE: ("#d55e00", "s", "--"),
    NAIVE + COMPILED: ("#009e73", "^", "-."),
    GATHER: ("#d55e00", "s", "--"),
    LOSS_PARALLEL: ("#cc79a7", "v", ":"),
}


def plot(file: Path, device: str, machine: dict[str, str | int], quick: bool) -> None:
    """Measures and draws. ``quick`` takes small vocabularies and one round."""
    vocabularies = [256, 512] if quick else VOCABULARIES[device]
    rows = 16 if quick else ROWS[device]
    results: dict[int, list[list[Result]]] = {ranks: [] for ranks in PROVIDERS}
    for ranks, providers in PROVIDERS.items():
        for vocab in vocabularies:
            case = Case("logprobs", (rows, vocab), "bfloat16", ranks)
            group = tuple(Run(case, provider) for provider in providers)
            results[ranks].append(measure(group, device, rounds=1 if quick else ROUNDS))
            for result in results[ranks][-1]:
                print(f"    {result}", flush=True)
    title = f"logprobs, forward and backward, {rows} rows, bf16"
    _draw(file, f"{title}\n{machine['machine']}, torch {machine['torch']}", vocabularies, results)


def _draw(
    file: Path, title: str, vocabularies: list[int], results: dict[int, list[list[Result]]]
) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Keep text as text, and make the same results give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dtensor_vocab"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    figure.suptitle(title, fontsize=11)
    for column, (ranks, by_vocabulary) in enumerate(results.items()):
        time, memory = axes[0][column], axes[1][column]
        time.set_title("one rank" if ranks == 1 else f"{ranks} ranks", fontsize=10)
        for provider in PROVIDERS[ranks]:
            of = [r for group in by_vocabulary for r in group if r.run.provider == provider]
            colour, marker, line = STYLES[provider]
            style = {"color": colour, "marker": marker, "linestyle": line, "label": provider}
            time.plot(vocabularies, [r.seconds * 1e3 for r in of], **style)
            memory.plot(vocabularies, [r.peak / MIB for r in of], **style)
        memory.set_xlabel("vocabulary")
        time.legend(fontsize=8)
    axes[0][0].set_ylabel("time (ms)")
    axes[1][0].set_ylabel("peak above the inputs (MiB per rank)")
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(vocabularies, [f"{vocab:,}" for vocab in vocabularies], fontsize=8)
        ax.minorticks_off()
        ax.grid(True, alpha=0.3)
    figure.savefig(file, format="svg", metadata={"Date": None})
