"""Timing on a card: replays of captured CUDA graphs, side by side, and the eager time of a call.

A graph holds as many calls of one contender as fill a few milliseconds, so that neither the launch nor the host is measured; the
median over the replays counts. Contenders take turns, each after an untimed replay of its own, so that a change of the clock hits
all alike and the L2 cache holds what it would hold.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from .timing import SLOW_SECONDS, Meter, Player, Run, reason

REPLAY_SECONDS = 2e-3


def _host_seconds(run: Run) -> float:
    """Of one call by the host's clock, until the card has finished it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class CudaPlayer(Player):
    """A CUDA graph of `calls` calls of `runs` in turn; or, where a run cannot be captured or `finish` waits for a library with streams
    of its own, the same calls made eagerly."""

    def __init__(self, runs: Sequence[Run], stream: torch.cuda.Stream, mode: str, finish: Run | None):
        self.runs, self.finish, self.note, self.stream = runs, finish or (lambda: None), {}, stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            runs[0]()  # handles, workspaces, lazily loaded kernels
            self.is_slow = _host_seconds(runs[0]) > SLOW_SECONDS
            for run in () if self.is_slow else (*runs, *runs[:1] * 2):
                run()
            torch.cuda.synchronize()
            self.calls = 1 if self.is_slow else self._calls()
            self._play = lambda: self._call(self.calls)
            why_eager = "it has streams of its own" if finish else "a call takes too long" if self.is_slow else ""
            if mode == "graph" and not why_eager:
                self._capture()
            elif mode == "graph":
                self.note = {"mode": "eager", "note": f"not captured in a graph: {why_eager}"}

    def _calls(self) -> int:
        few = self.runs[:5]
        one = max(1e-6, self._elapsed(lambda: self._call(len(few))) / len(few))
        rounds = max(1, round(REPLAY_SECONDS / one / len(self.runs)))
        return len(self.runs) * min(rounds, max(1, 2000 // len(self.runs)))

    def _call(self, calls: int) -> None:
        for call in range(calls):
            self.runs[call % len(self.runs)]()
        self.finish()

    def _elapsed(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._call(self.calls)
            finally:
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            self._play = graph.replay
        except Exception as error:  # not every library can be captured; its eager time is then the best that it gives
            torch.cuda.synchronize()
            self.note = {"mode": "eager", "note": f"not captured in a graph ({reason(error)})"}

    def play(self) -> None:
        """All calls; the host does not wait for them."""
        with torch.cuda.stream(self.stream):
            self._play()

    def seconds(self) -> float:
        """Time of all calls, after an untimed round."""
        with torch.cuda.stream(self.stream):
            if not self.is_slow:
                self._play()
            return self._elapsed(self._play)


class CudaMeter(Meter):
    """Measures on one card. `samples`: replays a number."""

    def __init__(self, device: torch.device | str = "cuda", samples: int = 9):
        super().__init__(samples)
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)

    def player(self, runs: Sequence[Run], mode: str, finish: Run | None = None) -> CudaPlayer:
        """A contender's graph, or its eager calls where `mode` is "eager"."""
        return CudaPlayer(runs, self._stream, mode, finish)

    def eager_us(self, run: Run, samples: int = 5) -> float:
        """Median time of one call by the host's clock, many calls in a row, until the card has finished them."""
        one = _host_seconds(run)
        if one > SLOW_SECONDS:
            return round(1e6 * one, 2)
        for _ in range(2):
            run()
        calls = max(1, min(500, int(5e-3 / max(_host_seconds(run), 1e-6))))
        seconds = []
        for _ in range(samples):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / calls)
        return round(1e6 * statistics.median(seconds), 2)

    def gpu_us(self, run: Run, calls: int = 10) -> float | None:
        """Mean time of the kernels and copies of a call, by the profiler; None where the machine forbids it."""
        calls = 1 if _host_seconds(run) > SLOW_SECONDS else calls
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(calls):
                    run()
                torch.cuda.synchronize()
            total = sum(event.self_device_time_total for event in profile.key_averages())
        except Exception:  # whatever the profiler says: the other numbers stand without it
            return None
        return round(total / calls, 2) if total else None

    def peak_bytes(self, make: Callable[[], Run]) -> int:
        """The most memory that calls of what `make` builds need at a time, what it builds included; measured in steady state."""
        torch.cuda.synchronize()
        gc.collect()  # what was there before and goes meanwhile would count against it
        before = torch.cuda.memory_allocated(self.device)
        run = make()
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    @contextlib.contextmanager
    def capped(self, gib: float | None) -> Iterator[None]:
        """Within: PyTorch's allocator gives no more than so much beyond what is in use."""
        if gib is None:
            yield
            return
        self.tidy()
        total = torch.cuda.get_device_properties(self.device).total_memory
        fraction = min(1.0, (gib * 2**30 + torch.cuda.memory_reserved(self.device)) / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def tidy(self) -> None:
        """Gives back the memory of graphs that are gone."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def facts(self) -> dict[str, object]:
        """Copy bandwidth in TB/s (bytes read and written), size of the L2 cache in MB, and what plans go by: capability and kernels."""
        source = torch.randn(1 << 28, device=self.device)
        target = torch.empty_like(source)
        # A kernel: a graph's own copy node is slower than what a kernel can reach.
        copy = self.player([lambda: torch.mul(source, 1.0, out=target)], "graph")
        found = self.compare({"copy": copy}, samples=7)["copy"]
        return {
            "copy_tb_s": round(2 * source.nbytes / found["time_us"] / 1e6, 3),
            "capability": list(torch.ops.snack.cuda_capability(self.device.index)),
            "kernels": torch.ops.snack.cuda_fingerprint(),
            "l2_mb": round(torch.cuda.get_device_properties(self.device).L2_cache_size / 1e6, 1),
        }
