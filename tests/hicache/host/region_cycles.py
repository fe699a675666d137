"""Start, stop and kill engines: none may leave a file in ``/dev/shm``.

    python -m tests.hicache.host.region_cycles --cycles 300 --kills 30

An engine is two ranks and a scheduler, which map a region as those of vLLM do: processes of this
file, two engines at a time. The exit status is 1 if a process did not find the others' pages, did
not come up, or left a file behind once another engine has started.
"""

import argparse
import json
import multiprocessing
import random
import secrets
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection

from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.pages.pool_shape import PoolShape

RANKS = 2
SHAPE = PoolShape(num_slots=256, slot_bytes=16 << 10, num_shards=RANKS)
UP_SECONDS = 60.0
FORK = multiprocessing.get_context("fork")
Process = multiprocessing.context.ForkProcess


def rank(pipe: Connection, name: str, number: int) -> None:
    """Run a rank: write its number to its shard, and read what the scheduler has written."""
    pool = HostPool(SHAPE, name, part=SHAPE.part(number), creates=number == 0)
    pool.page(number, 5, 1)[:] = bytes([number + 1])
    pipe.send("up")
    pipe.recv()
    pipe.send(bytes(pool.page(number, 6, 1)))
    pool.close()


def scheduler(pipe: Connection, name: str) -> None:
    """Run the scheduler: remove the name, write pages, and read what the ranks have written."""
    pool = HostPool(SHAPE, name)
    region.remove(name)
    for number in range(RANKS):
        pool.page(number, 6, 1)[:] = bytes([number + 101])
    pipe.send([bytes(pool.page(number, 5, 1)) for number in range(RANKS)])
    pipe.recv()
    pool.close()


class Engine:
    """Processes of one engine, with a region of a new name."""

    def __init__(self) -> None:
        self.name = region.PREFIX + secrets.token_hex(16)
        self.processes: list[Process] = []
        self._pipes: list[Connection] = []

    def start_ranks(self) -> None:
        for number in random.sample(range(RANKS), RANKS):
            self._start(rank, number)

    def start_scheduler(self) -> bool:
        """Start the scheduler when the ranks are up; return whether it has found their pages."""
        if not all(pipe.poll(UP_SECONDS) and pipe.recv() == "up" for pipe in self._pipes):
            return False
        self._start(scheduler)
        found = self._pipes[-1].recv() if self._pipes[-1].poll(UP_SECONDS) else None
        return bool(found == [bytes([number + 1]) for number in range(RANKS)])

    def stop(self) -> bool:
        """Stop the engine in order; return whether the ranks have found the scheduler's pages."""
        for pipe in self._pipes:
            pipe.send("end")
        found = [pipe.recv() for pipe in self._pipes[:RANKS] if pipe.poll(UP_SECONDS)]
        for process in self.processes:
            process.join(UP_SECONDS)
        ended = all(process.exitcode == 0 for process in self.processes)
        return ended and sorted(found) == [bytes([number + 101]) for number in range(RANKS)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def leaves(self) -> int:
        return len(list(region.SHM.glob(f"{self.name}*")))

    def _start(self, run: object, *arguments: int) -> None:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=run, args=(theirs, self.name, *arguments))  # type: ignore[arg-type]
        process.start()
        theirs.close()
        self.processes.append(process)
        self._pipes.append(ours)


def cycle(counts: Counter[str]) -> None:
    """Run two engines at once, from start to stop; neither may take or delete the other's file."""
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.start_ranks()
    good = [engine.start_scheduler() for engine in engines]
    ended = [engine.stop() for engine in engines]
    counts["failed"] += not all(good + ended)
    counts["cycles"] += 1
    counts["left"] += sum(engine.leaves() for engine in engines)


def kill(counts: Counter[str], draw: random.Random) -> Engine:
    engine = Engine()
    engine.start_ranks()
    time.sleep(draw.random() * 0.03)
    engine.kill()
    counts["kills"] += 1
    counts["orphans"] += engine.leaves()
    return engine


def run(cycles: int, kills: int, seed: int) -> dict[str, int]:
    """Run cycles and kills in any order; count the files left after one more start."""
    counts: Counter[str] = Counter(left=0, failed=0, orphans=0)
    draw = random.Random(seed)
    dead = []
    for kind in draw.sample(["cycle", "kill"], cycles + kills, counts=[cycles, kills]):
        if kind == "cycle":
            cycle(counts)
        else:
            dead.append(kill(counts, draw))
    cycle(counts)
    counts["left"] += sum(engine.leaves() for engine in dead)
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    counts = run(arguments.cycles, arguments.kills, arguments.seed)
    print(json.dumps(counts), flush=True)
    return 1 if counts["left"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
