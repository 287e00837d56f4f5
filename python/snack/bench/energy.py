"""Energy of work on a card, by NVML's counter of the card's total energy.

The counter moves about every 100 ms and a card gets warmer while it works: so windows last seconds, contenders take turns, and what the
card takes when it does nothing is measured just before and reported apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import SnackError, require

# Mean of the world's electricity in 2024: 473 g of CO2-equivalent a kWh.
GRAMS_PER_KWH = 473.0
SOURCE = "Ember, Global Electricity Review 2025, world mean of 2024"
_CHUNK_SECONDS = 0.05  # of work between two looks at the clock; the host never runs further ahead than this
_MJ_PER_KWH = 3.6e9


class EnergyMeter:
    """Energy a call, mean power and CO2 of pieces of work that take turns on one card.

        meter = snack.bench.EnergyMeter()
        found = meter.compare({"sparse": lambda: layer(x), "dense": lambda: linear(x)})
        found["sparse"]["energy_mj"]

    Args:
        device: the card; default the current one. It is found in NVML by its UUID, whatever CUDA_VISIBLE_DEVICES says.
        seconds: of a window, at least 1; the counter's steps ask for 5. rounds: windows of everybody, in turn.
        idle_seconds: for which the idle card is watched before a comparison.
        grams_per_kwh, source: of CO2; the default is the mean of the world.
        nvml, uuid, clock, sleep, wait: what to use instead of pynvml, the card's UUID, the host's clock and torch.cuda.synchronize.

    Raises: SnackError, where there is no card, no NVML (package nvidia-ml-py) or no such counter.
    """

    def __init__(
        self,
        device: object = None,
        *,
        seconds: float = 5.0,
        rounds: int = 2,
        idle_seconds: float = 3.0,
        grams_per_kwh: float = GRAMS_PER_KWH,
        source: str = SOURCE,
        nvml: object = None,
        uuid: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wait: Callable[[], None] | None = None,
    ):
        require(seconds >= 1, f"EnergyMeter: a window of {seconds:g} s is shorter than the counter can tell; use 5 s or more.")
        require(rounds >= 1 and idle_seconds > 0 and grams_per_kwh >= 0, "EnergyMeter: rounds, idle_seconds and grams_per_kwh must be positive.")
        self.seconds, self.rounds, self.idle_seconds = seconds, rounds, idle_seconds
        self.grams_per_kwh, self.source = grams_per_kwh, source
        self._clock, self._sleep = clock, sleep
        if uuid is None or wait is None:
            uuid, wait = _card(device)
        self._wait = wait
        self._nvml = _pynvml() if nvml is None else nvml
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:  # NVML's own errors, and a machine that forbids it
            raise SnackError(f"EnergyMeter: NVML does not open the card {uuid} ({error}); energy cannot be measured here.") from None
        self._millijoules()

    def facts(self) -> dict[str, object]:
        """How it measures, for the provenance of records."""
        return {"window_s": self.seconds, "rounds": self.rounds, "g_per_kwh": self.grams_per_kwh, "source": self.source}

    def idle_watts(self) -> float:
        """Mean power of the card while nothing is asked of it."""
        self._wait()
        begin, before = self._clock(), self._millijoules()
        self._sleep(self.idle_seconds)
        return (self._millijoules() - before) / 1e3 / (self._clock() - begin)

    def compare(self, works: dict[str, object]) -> dict[str, dict[str, float]]:
        """{name: {"energy_mj", "energy_net_mj", "power_w", "idle_w", "co2_ug", "energy_spread"}}, a call.

        `works`: {name: function} or {name: (function, calls that it makes)}; a function may return before the card is done. Net is
        without what the idle card would have taken in the same time; the spread is (largest - smallest window) / mean.
        """
        pairs = {name: work if isinstance(work, tuple) else (work, 1) for name, work in works.items()}
        chunks = {name: self._chunk(play) for name, (play, _) in pairs.items()}
        idle = self.idle_watts()
        windows: dict[str, list[tuple[float, float, int]]] = {name: [] for name in pairs}
        for _ in range(self.rounds):
            for name, (play, calls) in pairs.items():
                energy, seconds, plays = self._window(play, chunks[name])
                windows[name].append((energy, seconds, plays * calls))
        return {name: self._summary(found, idle) for name, found in windows.items()}

    def _chunk(self, play: Callable[[], object]) -> int:
        """How many plays fill a chunk."""
        play()
        self._wait()
        begin = self._clock()
        play()
        self._wait()
        return max(1, int(_CHUNK_SECONDS / max(self._clock() - begin, 1e-6)))

    def _window(self, play: Callable[[], object], chunk: int) -> tuple[float, float, int]:
        """(mJ, seconds, plays) of one window."""
        self._wait()
        plays, begin, before = 0, self._clock(), self._millijoules()
        while (seconds := self._clock() - begin) < self.seconds:
            for _ in range(chunk):
                play()
            self._wait()
            plays += chunk
        energy = self._millijoules() - before
        require(energy > 0, f"EnergyMeter: the card's energy counter did not move in {seconds:.1f} s; energy cannot be measured here.")
        return energy, seconds, plays

    def _summary(self, windows: list[tuple[float, float, int]], idle: float) -> dict[str, float]:
        energy, seconds, calls = (sum(column) for column in zip(*windows))
        a_call = [window[0] / window[2] for window in windows]
        mean = energy / calls
        return {
            "energy_mj": _digits(mean), "energy_net_mj": _digits((energy - 1e3 * idle * seconds) / calls),
            "power_w": round(energy / 1e3 / seconds, 1), "idle_w": round(idle, 1),
            "co2_ug": _digits(1e6 * self.grams_per_kwh * mean / _MJ_PER_KWH),
            "energy_spread": round((max(a_call) - min(a_call)) / mean, 4),
        }

    def _millijoules(self) -> int:
        """The counter."""
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:
            raise SnackError(f"EnergyMeter: the card has no counter of its energy ({error}); energy cannot be measured here.") from None


def _digits(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def _pynvml():
    try:
        import pynvml
    except ImportError:
        raise SnackError("EnergyMeter: NVML's Python package is not installed: pip install nvidia-ml-py.") from None
    return pynvml


def _card(device: object) -> tuple[str, Callable[[], None]]:
    """(UUID as NVML writes it, function that waits for the card)."""
    import torch

    require(torch.cuda.is_available(), "EnergyMeter: there is no NVIDIA card here, and energy is measured on those alone.")
    index = torch.device("cuda" if device is None else device).index
    index = torch.cuda.current_device() if index is None else index
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}", lambda: torch.cuda.synchronize(index)
