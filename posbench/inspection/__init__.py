"""`posbench inspect`: an encoding's numbers, two claims about it checked, and figures of both."""

from __future__ import annotations

import json
import sys

from posbench.config import Format, InspectSettings
from posbench.inspection.facts import facts_of, inspect_encoding, prepare
from posbench.inspection.table import print_table


def run_inspect(settings: InspectSettings) -> None:
    """Print the encoding's numbers to stdout, and draw them into `settings.plot` if it is given."""
    if settings.plot is None:
        subject = prepare(settings)
    else:
        from posbench.inspection import figures  # matplotlib is slow to import

        target = figures.check_target(settings.plot)
        subject = prepare(settings)
        figures.write_figure(subject, target)
        print(f"figure written to {target}", file=sys.stderr)
    facts = facts_of(subject)
    if settings.format is Format.json:
        print(json.dumps(facts, indent=1, allow_nan=False))
        return
    print_table(subject, facts)


__all__ = ["inspect_encoding", "run_inspect"]
