"""What a few seeds can tell: means, differences and ranks, with 95 % intervals."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

CONFIDENCE = 0.95
LEAST_RANKED = 4  # Fisher's z of fewer has no standard error


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number, and where the true one lies with a confidence of 95 %."""

    value: float
    interval: tuple[float, float] | None  # None: the data do not tell


@dataclasses.dataclass(frozen=True)
class Difference(Estimate):
    """Of two means, and how likely one as large would be were there none."""

    p: float | None  # two-sided; None: the data do not tell


def mean(values: Sequence[float]) -> Estimate:
    """The mean over seeds, with Student's t interval: mean ± t(n - 1) s / sqrt(n).

    One seed has no interval. Nor have several of one and the same value, such as those that get everything right: a
    spread of 0 would claim a certainty that a few seeds do not give.
    """
    value = float(np.mean(values))
    if not _spread(values):
        return Estimate(value, None)
    half = _t(len(values) - 1) * math.sqrt(_variance_of_mean(values))
    return Estimate(value, (value - half, value + half))


def difference(ours: Sequence[float], base: Sequence[float]) -> Difference:
    """mean(ours) - mean(base), with the interval and the two-sided test of Welch's t.

    Unpaired: with the same seed two rows see the data in the same order, but most start from other parameters, and
    with three seeds pairing would halve the degrees of freedom. What the seeds do have in common makes this test
    miss effects, not invent them. Welch's, as a row that is hard to train spreads more than base.

        t = (mean_1 - mean_2) / sqrt(v_1 + v_2)  with  v = s^2 / n,
        degrees of freedom (v_1 + v_2)^2 / (v_1^2 / (n_1 - 1) + v_2^2 / (n_2 - 1))
    """
    value = float(np.mean(ours) - np.mean(base))
    if min(len(ours), len(base)) < 2 or not (_spread(ours) or _spread(base)):
        return Difference(value, None, None)
    v1, v2 = _variance_of_mean(ours), _variance_of_mean(base)
    freedom = (v1 + v2) ** 2 / (v1**2 / (len(ours) - 1) + v2**2 / (len(base) - 1))
    error = math.sqrt(v1 + v2)
    p = 2 * float(scipy.stats.t.sf(abs(value) / error, freedom))
    half = _t(freedom) * error
    return Difference(value, (value - half, value + half), p)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number, after Holm: in 95 % of sweeps no effect that is none comes below 0.05.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none becomes smaller than one before it, or
    larger than 1.
    """
    order = np.argsort(ps, kind="stable")
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.asarray(ps)[order] * np.arange(len(ps), 0, -1))
    return np.minimum(corrected, 1).tolist()


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """Spearman's rho, with the interval of Fisher's z and Bonett and Wright's standard error.

        tanh(atanh(rho) ± 1.96 sqrt((1 + rho^2 / 2) / (n - 3)))

    Rows count as a sample of the changes that one could make. The other way, to draw seeds anew, would hold the rows
    fixed; but three seeds drawn from three are too alike, and one seed has none to draw.

    Returns:
      None if there are fewer than four, or if one side is all the same. No interval if the ranks agree fully, or are
      fully reversed.
    """
    if len(ours) < LEAST_RANKED or not (np.ptp(ours) and np.ptp(theirs)):
        return None
    rho = float(scipy.stats.spearmanr(ours, theirs).statistic)
    if abs(rho) > 1 - 1e-9:  # by rounding, not quite 1
        return Estimate(round(rho), None)
    half = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt((1 + rho**2 / 2) / (len(ours) - 3))
    return Estimate(rho, (math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)))


def _spread(values: Sequence[float]) -> float:
    return float(np.ptp(values))


def _variance_of_mean(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1)) / len(values)


def _t(freedom: float) -> float:
    return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
