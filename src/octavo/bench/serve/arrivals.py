"""When requests are sent: at once, at random times of a rate, or as a trace recorded them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from octavo.errors import InvalidRequestError


def random_arrivals(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, of so many requests at `rate` a second.

    Gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less comes in bursts, more is more even. An infinite rate: all at once. The last
    arrival is scaled to its expected time, so that runs of other seeds have the same length.
    """
    if not rate > 0:
        raise InvalidRequestError(
            f"--request-rate must be above 0 (inf: all at once), got {rate}",
            parameter="request_rate",
        )
    if not 0 < burstiness < math.inf:
        raise InvalidRequestError(
            f"--burstiness must be above 0 and finite, got {burstiness}", parameter="burstiness"
        )
    if math.isinf(rate):
        return [0.0] * num
    rng = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(num):
        now_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now_s)
    scale = (num / rate) / times[-1] if times else 1.0
    return [time_s * scale for time_s in times]


def trace_arrivals(recorded: Sequence[float | None], speed: float) -> list[float]:
    """As a trace has them, `speed` times as fast, from 0. Raises `InvalidRequestError` without
    times, or for times that go back."""
    if not 0 < speed < math.inf:
        raise InvalidRequestError(
            f"--trace-speed must be above 0 and finite, got {speed}", parameter="trace_speed"
        )
    times = [time_s for time_s in recorded if time_s is not None]
    if len(times) != len(recorded):
        raise InvalidRequestError(
            "--request-rate trace needs a dataset whose rows have arrival_s", parameter="dataset"
        )
    if any(b < a for a, b in pairwise(times)):
        raise InvalidRequestError("the dataset's arrival_s go back in time", parameter="dataset")
    return [(time_s - times[0]) / speed for time_s in times]
