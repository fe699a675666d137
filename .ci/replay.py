"""How many rows of the ledger each step between neighbouring versions of vLLM moves.

`.ci/replay.py [--rows] OLDEST ... NEWEST`: wheels of vLLM, or folders that they were unpacked to.
Each row is asked for its newest form, so that a symbol that a version brought counts as moved by
it. An older plugin had no row for that: "refused" counts rows alone that lost what was there.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_graft.seams.compare import LEDGER, SeamReport, read_seams
from vllm_graft.seams.sources import Sources

NEWEST = (99, 0)
Pair = tuple[SeamReport, SeamReport]


def moved(old: Sources, new: Sources) -> list[Pair]:
    """Rows that differ between two versions; a symbol that is missing in both is the same."""
    seams = [seam.at(NEWEST) for seam in LEDGER]
    pairs = zip(read_seams(seams, old), read_seams(seams, new))
    return [pair for pair in pairs if _form(pair[0]) != _form(pair[1])]


def refused(pairs: list[Pair], new: Sources) -> Iterator[SeamReport]:
    """Rows that a plugin written for the older version would have found moved."""
    known = [replace(old.seam, expected=old.found) for old, _ in pairs if not old.is_missing]
    return (report for report in read_seams(known, new) if not report.ok)


def _form(report: SeamReport) -> str:
    return "" if report.found.startswith("nothing") else report.found


def main() -> None:
    """Print a line for each step, and the mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--rows", action="store_true", help="name each row that moved")
    arguments = parser.parse_args()
    print(f"{len(LEDGER)} rows")
    counts = []
    for old, new in itertools.pairwise(map(Sources, arguments.paths)):
        pairs = moved(old, new)
        stopped = Counter(report.seam.part for report in refused(pairs, new))
        counts.append(len(pairs))
        kinds = Counter(before.seam.kind for before, _ in pairs)
        print(
            f"{old.version} to {new.version}: {len(pairs)} moved {dict(kinds.most_common())}, "
            f"{stopped.total()} refused {dict(stopped.most_common())}"
        )
        for before, after in pairs if arguments.rows else ():
            print(f"  {before.seam.part} {before.seam.kind} {before.seam.path}")
            print(f"    - {before.found}\n    + {after.found}")
    print(f"mean {sum(counts) / len(counts):.1f}")


if __name__ == "__main__":
    main()
