"""Ten thousand fits on hostile but finite data: finite results or a named error.

    python doc/benchmarks/fuzz.py                     10,000 fits
    python doc/benchmarks/fuzz.py --quick             500 fits
    python doc/benchmarks/fuzz.py --first 2000 --fits 1000

The cases are those of tests/hostile.py: constant, duplicated and rescaled columns, separable
labels, fewer rows than columns, huge weights, groups of one class, every estimator in many
settings; scales of columns from 1e-160 to 1e160 and origins of up to 1e8. Every fourth is of labels
of groups of any kind, small crossed and nested factors, powers, or two units of two to five
classes. A fault is an exception
that is not a ValueError naming the argument, a RuntimeWarning, a number that is not finite, a fit
that calls itself converged with a residual above its tolerance, or one that depends on units which
it cannot know; its seed is printed, and `attempt(seed, stretch=True)` or `attempt_kind(seed)`
repeats it.
"""

import pathlib
import sys

from common import arguments, save

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from hostile import attempt, attempt_kind


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--first", dict(type=int, default=0, help="first seed")),
        ("--fits", dict(type=int, default=None, help="number of fits")),
    )
    fits = args.fits or (500 if args.quick else 10_000)
    faults = []
    for seed in range(args.first, args.first + fits):
        fault = attempt_kind(seed) if seed % 4 == 0 else attempt(seed, stretch=True)
        if fault:
            faults.append(fault)
            print(fault, flush=True)
    print(f"{len(faults)} faults in {fits} fits")
    save(args, "fuzz", [dict(first=args.first, fits=fits, faults=faults)])


if __name__ == "__main__":
    main()
