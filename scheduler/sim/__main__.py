"""``python -m scheduler.sim``: play seeds, shrink and explain what fails."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from scheduler.sim.acts import Plan, plan
from scheduler.sim.shrink import play, shrink


def main(argv: list[str] | None = None) -> int:
    """0 when every history was as it must be, 1 when one was not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.sim",
        description="Play random histories of a cluster with faults and audit them.",
    )
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--steps", type=int, default=100, help="acts in a history")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--keep", help="replay only these acts, like 3,17,20-25 (- for none)")
    parser.add_argument("--no-shrink", action="store_true", help="only name the seeds that fail")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.count < 1:
        parser.error("--steps and --count must be at least 1")
    try:
        keep = None if args.keep is None else parse_keep(args.keep)
    except ValueError:
        parser.error(f"--keep {args.keep} is not a list of numbers and ranges")
    failed: list[int] = []
    began_s = time.monotonic()
    for seed in range(args.seed, args.seed + args.count):
        chosen = plan(seed, args.steps)
        if keep is not None:
            chosen = replace(chosen, acts=tuple(a for a in chosen.acts if a.number in keep))
        trace: list[str] | None = [] if args.trace else None
        failure = play(chosen, trace=trace)
        if trace:
            print("\n".join(trace))
        if failure is None:
            continue
        failed.append(seed)
        print(f"seed {seed}: {failure}", flush=True)
        if not args.no_shrink and keep is None:
            explain(shrink(chosen, failure.rule), args.steps)
    took_s = time.monotonic() - began_s
    print(f"{args.count} histories of {args.steps} acts, {len(failed)} failed, {took_s:.1f} s")
    return 1 if failed else 0


def explain(small: Plan, steps: int) -> None:
    """Print the short history and how to play it again."""
    print(f"  it still fails with {len(small.acts)} acts:")
    for act in small.acts:
        picks = " ".join(f"{p:.3f}" for p in act.picks)
        print(f"    {act.at_s:9.3f} s  {act.number:4d}  {act.kind:16s} {picks}")
    print(f"  {play(small)}")
    keep = format_keep([a.number for a in small.acts])
    print(
        f"  python -m scheduler.sim --seed {small.seed} --steps {steps} --keep {keep} --trace",
        flush=True,
    )


def parse_keep(text: str) -> set[int]:
    """``"3,17,20-25"`` -> the numbers.  Raises ``ValueError``."""
    if text == "-":
        return set()
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return numbers


def format_keep(numbers: list[int]) -> str:
    """The short form of ascending ``numbers``."""
    parts: list[str] = []
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            first = numbers[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = i + 1
    return ",".join(parts) or "-"


if __name__ == "__main__":
    sys.exit(main())
