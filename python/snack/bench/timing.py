"""Side-by-side timing: contenders take turns, so that a disturbance of the machine hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

SAMPLE_SECONDS = 5e-3  # one sample is as many calls as fill this, so that the clock's own cost does not matter


def _calls_a_sample(run: Callable[[], object]) -> int:
    for _ in range(3):
        run()
    start = time.perf_counter()
    run()
    return max(1, int(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7)))


def interleave(contenders: dict[str, Callable[[], object]], samples: int = 25) -> dict[str, dict[str, float]]:
    """{name: {"time_us": median, "time_iqr_us": interquartile range}} of one call of each contender."""
    calls = {name: _calls_a_sample(run) for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(samples):
        for name, run in contenders.items():
            run()  # untimed: the caches still hold the contender before
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    result = {}
    for name, times in seconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        result[name] = {"time_us": round(1e6 * median, 2), "time_iqr_us": round(1e6 * (high - low), 2)}
    return result
