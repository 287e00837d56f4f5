"""Runs a function on several processes with a process group between them; what they return comes back, and so does what they raise.

The processes are started once and serve every test; each call gets a process group of its own.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import traceback

import torch
from torch import distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "snack"])
_workers = []  # (process, pipe)


def _serve(pipe):
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    while True:
        function, rank, world, folder, backend, args = pickle.loads(pipe.recv_bytes())
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world)
            result = function(rank, world, *args)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps((result, None)))  # bytes, as shared memory of tensors would end with this process
        except BaseException:
            pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
            os._exit(1)


def _start(world):
    while len(_workers) < world:
        here, there = _context.Pipe()
        process = _context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _workers.append((process, here))


@atexit.register
def stop():
    """End the processes; the next call starts new ones."""
    for process, pipe in _workers:
        process.kill()
        pipe.close()
    _workers.clear()


def run(function, world=2, *args, backend="gloo", timeout=120):
    """[function(rank, world, *args) of every rank]; a rank's failure is raised here with its traceback."""
    _start(world)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [pipe for _, pipe in _workers[:world]]
        try:
            for rank, pipe in enumerate(pipes):
                pipe.send_bytes(pickle.dumps((function, rank, world, folder, backend, args)))
            found = {}
            while len(found) < world:
                ready = multiprocessing.connection.wait([p for r, p in enumerate(pipes) if r not in found], timeout)
                assert ready, f"no answer after {timeout} s from ranks {[r for r in range(world) if r not in found]}"
                for pipe in ready:
                    rank = pipes.index(pipe)
                    found[rank], problem = pickle.loads(pipe.recv_bytes())
                    assert problem is None, f"rank {rank}:\n{problem}"
        except BaseException:
            stop()  # the others may still wait for a rank that failed
            raise
    return [found[rank] for rank in range(world)]
