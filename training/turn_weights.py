"""Fits the weights with which the engine scores the end of a turn (`engine/end_of_turn.py`), on labelled pauses.

    python -m training.turn_weights MANIFEST [--model NAME]

The pauses, their labels and the detector's answers are those of `benchmarks/turns.py`; only its first half of speakers
is used, so that the other half can be measured. Prints the weights with the detector and without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.measuring import parser_of, run_command, show
from benchmarks.recordings import SMALL_MODEL, add_manifest, exit_status
from benchmarks.turns import MOMENTS_S, PauseCase, labelled_cases
from engine.end_of_turn import MAX_PROBABILITY, MIN_PROBABILITY, MIN_SILENCE_MS, WordEvidence, evidence_of
from engine.options import DEFAULT_MODEL
from engine.runner.device import compute_on_one_thread

# Recordings of single sentences have more ends than speech has: there a speaker pauses a few times in a turn.
ENDS_SHARE = 2 / 7
_MOMENTS_S = (0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2, 3.0, 4.0)


def fit(cases: Sequence[PauseCase], detector: bool) -> dict[str, Any]:
    """Logistic regression: at each moment of a pause that still lasts, whether it is an end. A pause counts once, and
    ends and others count as if `ENDS_SHARE` of all pauses were ends."""
    rows, labels, weights = [], [], []
    ends = sum(case.silence is None for case in cases)
    counts = {
        True: ENDS_SHARE * len(cases) / max(ends, 1),
        False: (1 - ENDS_SHARE) * len(cases) / max(len(cases) - ends, 1),
    }
    for case in cases:
        moments = [at for at in _MOMENTS_S if case.silence is None or at <= case.silence]
        for at in moments:
            evidence = evidence_of(case.text(case.fell + at))
            answer = case.answers[max(asked for asked in MOMENTS_S if asked <= at)]
            probability = min(max(answer, MIN_PROBABILITY), MAX_PROBABILITY)
            odds = np.log(probability / (1 - probability)) if detector else 0.0
            words = (float(evidence is kind) for kind in WordEvidence)
            rows.append([1.0, odds, *words, np.log(at * 1000 / MIN_SILENCE_MS)])
            labels.append(float(case.silence is None))
            weights.append(counts[case.silence is None] / len(moments))
    x, y, weight = np.array(rows), np.array(labels), np.array(weights)
    solution, penalty = np.zeros(x.shape[1]), np.full(x.shape[1], 0.3)
    penalty[0] = 1e-6
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ solution))
        gradient = x.T @ (weight * (p - y)) + penalty * solution
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        solution = solution - np.linalg.solve(hessian, gradient)
    bias, odds, none, unfinished, open_, finished, growth = solution.round(2).tolist()
    return {"bias": bias, "detector": odds, "words": (none, unfinished, open_, finished), "growth": growth}


def fit_both(options: argparse.Namespace) -> dict[str, Any]:
    first = [case for case in labelled_cases(options, MOMENTS_S)[0] if case.calibrates]
    found = {"FUSED": fit(first, True), "WORDS_ONLY": fit(first, False)}
    show("Weights, fitted on the first half of speakers", found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_manifest(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model whose words are read")
    compute_on_one_thread()
    return exit_status(lambda: run_command(parser, arguments, fit_both, model=SMALL_MODEL))


if __name__ == "__main__":
    sys.exit(main())
