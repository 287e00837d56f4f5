"""Side-by-side timing: contenders take turns, so that a disturbance of the machine hits all of them alike.

A `Player` plays one contender many times in a row, so that the clock's own cost does not matter. A `Meter` prepares players and takes
times; this one is the host's, `cuda_timing` has the card's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ..errors import SnackError

Run = Callable[[], object]
SAMPLE_SECONDS = 5e-3  # about how long a player plays
SLOW_SECONDS = 0.1  # a call that takes longer plays alone, and twice: it must not take the time of all others


def reason(error: BaseException) -> str:
    """Why a peer did not run, in one line."""
    text = str(error).strip().splitlines()
    if text and isinstance(error, NotImplementedError | SnackError):  # they are sentences
        return text[0][:300]
    return f"{type(error).__name__}: {text[0]}"[:300] if text else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Of the card, or of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def spread(seconds: list[float], calls: int = 1) -> dict[str, float]:
    """{"time_us": median, "time_iqr_us": interquartile range} of one call."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"time_us": round(1e6 * median / calls, 3), "time_iqr_us": round(1e6 * (high - low) / calls, 3)}


class Player:
    """`calls` calls of `runs` in turn by the host's clock; `finish` waits for the last of them. `note`: what the record says of it."""

    def __init__(self, runs: Sequence[Run], finish: Run = lambda: None):
        self.runs, self.finish, self.note = runs, finish, {}
        self._time(len(runs))
        self.is_slow = self._time(1) > SLOW_SECONDS
        for _ in range(0 if self.is_slow else 2):
            self._time(len(runs))
        self.calls = 1 if self.is_slow else max(1, int(SAMPLE_SECONDS * len(runs) / max(self._time(len(runs)), 1e-7)))

    def _time(self, calls: int) -> float:
        start = time.perf_counter()
        for call in range(calls):
            self.runs[call % len(self.runs)]()
        self.finish()
        return time.perf_counter() - start

    def play(self) -> None:
        """All calls."""
        self._time(self.calls)

    def seconds(self) -> float:
        """Time of all calls, after an untimed one: the caches still hold the contender before."""
        if not self.is_slow:
            self.runs[0]()
        return self._time(self.calls)


class Meter:
    """Measures on the host's processor. `samples`: times that every player plays."""

    device = torch.device("cpu")

    def __init__(self, samples: int = 25):
        self.samples = samples

    def player(self, runs: Sequence[Run], mode: str, finish: Run | None = None) -> Player:
        """Of one contender: a list of runs that take turns call by call, one for warm weights, several with copies for cold ones."""
        return Player(runs, finish or (lambda: None))

    def compare(self, players: dict[str, Player], samples: int | None = None) -> dict[str, dict]:
        """{name: {"time_us", "time_iqr_us", and what the player notes}} of one call of each."""
        seconds: dict[str, list[float]] = {name: [] for name in players}
        for sample in range(samples or self.samples):
            for name, player in players.items():
                if sample < 2 or not player.is_slow:
                    seconds[name].append(player.seconds())
        return {name: {**spread(found, players[name].calls), **players[name].note} for name, found in seconds.items()}

    def eager_us(self, run: Run) -> float | None:
        """Time of a call beside a replayed graph; None where `compare` already takes it."""
        return None

    def gpu_us(self, run: Run) -> float | None:
        """Time in which the card computes during a call; None where there is none."""
        return None

    def peak_bytes(self, make: Callable[[], Run]) -> int | None:
        """The most memory that calls of what `make` builds need at a time; None where it cannot be watched."""
        return None

    @contextlib.contextmanager
    def capped(self, gib: float | None) -> Iterator[None]:
        """Within: no more than so much new memory can be had."""
        if gib is not None:
            raise SnackError("snack bench: the memory of the host cannot be capped; leave the cap out, or measure on a card.")
        yield

    def tidy(self) -> None:
        """Gives back the memory of what is gone."""

    def facts(self) -> dict[str, float]:
        """What the records of a card need: copy bandwidth and size of the L2 cache; nothing on the host."""
        return {}
