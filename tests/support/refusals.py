"""How many calls were checked to be refused: for what a run of the tests says at its end."""

import collections


def count_refused(reports) -> dict[str, collections.Counter]:
    """How many for each reason, by implementation."""
    counts: dict[str, collections.Counter] = {}
    for report in reports:
        properties = dict(report.user_properties)
        if report.passed and "refused" in properties:
            reasons = counts.setdefault(properties["implementation"], collections.Counter())
            reasons[properties["refused"]] += 1
    return counts
