"""Runs in a child under a sanitizer: the kernels named, each after its name."""

from __future__ import annotations

import sys

from tests.cuda.mistakes import Mistakes

if __name__ == "__main__":
    mistakes = Mistakes()
    for name in sys.argv[1:]:
        print(f"case {name}", flush=True)
        outcome = mistakes.run(name)
        print(outcome.error, flush=True)
    print("case end\ndone", flush=True)
