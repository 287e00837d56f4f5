"""Timing on a card: replays of captured CUDA graphs, side by side, and the eager time of a call.

A graph holds as many calls of one contender as fill a few milliseconds, so that neither the launch nor the host is measured; the
median over the replays counts. Contenders take turns, each after an untimed replay of its own, so that a change of the clock hits
all alike and the L2 cache holds what it would hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], object]


def reason(error: BaseException) -> str:
    """Why a peer did not run, in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:300] if text else type(error).__name__


def spread(seconds: list[float], calls: int = 1) -> dict[str, float]:
    """{"time_us": median, "time_iqr_us": interquartile range} of one call."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"time_us": round(1e6 * median / calls, 3), "time_iqr_us": round(1e6 * (high - low) / calls, 3)}


class _Captured:
    """A CUDA graph of `calls` calls of `runs` in turn; or, where a run cannot be captured, the same calls made eagerly."""

    def __init__(self, runs: Sequence[Run], stream: torch.cuda.Stream, seconds: float):
        self.note: dict[str, str] = {}
        self.stream = stream
        with torch.cuda.stream(stream):
            for run in (*runs, *runs[:1] * 3):  # handles, workspaces, lazily loaded kernels
                run()
            torch.cuda.synchronize()
            one = max(1e-6, self._elapsed(lambda: [run() for run in runs[:5]]) / len(runs[:5]))
            rounds = max(1, round(seconds / one / len(runs)))
            self.calls = len(runs) * min(rounds, max(1, 2000 // len(runs)))
            self._capture(runs)

    def _elapsed(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _capture(self, runs: Sequence[Run]) -> None:
        def all_calls() -> None:
            for call in range(self.calls):
                runs[call % len(runs)]()

        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                all_calls()
            finally:
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            self._play = graph.replay
        except Exception as error:  # not every library can be captured; its eager time is then the best that it gives
            torch.cuda.synchronize()
            self.note = {"mode": "eager", "note": f"not captured in a graph ({reason(error)})"}
            self._play = all_calls

    def seconds(self) -> float:
        """Time of one replay, after an untimed one."""
        with torch.cuda.stream(self.stream):
            self._play()
            return self._elapsed(self._play)


class CudaMeter:
    """Measures on one card. `samples`: replays a number; `replay_seconds`: about how long one lasts."""

    mode = "graph"

    def __init__(self, device: torch.device | str = "cuda", samples: int = 9, replay_seconds: float = 2e-3):
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)
        self.samples, self.replay_seconds = samples, replay_seconds
        self._stream = torch.cuda.Stream(self.device)

    def compare(self, contenders: dict[str, Sequence[Run]], samples: int | None = None) -> dict[str, dict]:
        """{name: {"time_us", "time_iqr_us"} or {"not_run": why}}. A contender is a list of runs that take turns call by call:
        one run for warm weights, several with copies of their own for cold ones."""
        result: dict[str, dict] = {}
        captured: dict[str, _Captured] = {}
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for name, runs in contenders.items():
            try:
                captured[name] = _Captured(runs, self._stream, self.replay_seconds)
            except Exception as error:  # one contender's failure must not end the measurement of the others
                result[name] = {"not_run": reason(error)}
        seconds: dict[str, list[float]] = {name: [] for name in captured}
        for _ in range(samples or self.samples):
            for name in captured:
                seconds[name].append(captured[name].seconds())
        for name, found in seconds.items():
            result[name] = {**spread(found, captured[name].calls), **captured[name].note}
        return {name: result[name] for name in contenders}

    def eager_us(self, run: Run, samples: int = 5) -> float:
        """Median time of one call by the host's clock, many calls in a row, until the card has finished them."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        calls = max(1, min(500, int(5e-3 / max(time.perf_counter() - start, 1e-6))))
        seconds = []
        for _ in range(samples):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / calls)
        return round(1e6 * statistics.median(seconds), 2)

    def peak_bytes(self, make: Callable[[], Run]) -> int:
        """The most memory that calls of what `make` builds need at a time, what it builds included; measured in steady state."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        run = make()
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def tidy(self) -> None:
        """Gives back the memory of graphs that are gone."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def facts(self) -> dict[str, float]:
        """Copy bandwidth in TB/s (bytes read and written) and size of the L2 cache in MB."""
        source = torch.randn(1 << 28, device=self.device)
        target = torch.empty_like(source)
        # A kernel: a graph's own copy node is slower than what a kernel can reach.
        found = self.compare({"copy": [lambda: torch.mul(source, 1.0, out=target)]}, samples=7)["copy"]
        return {
            "copy_tb_s": round(2 * source.nbytes / found["time_us"] / 1e6, 3),
            "l2_mb": round(torch.cuda.get_device_properties(self.device).L2_cache_size / 1e6, 1),
        }
