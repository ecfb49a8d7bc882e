"""Issues to resolve, in the form of SWE-bench: a repository, a problem statement, and tests that fail until it is solved."""

from __future__ import annotations

INSTANCES = {
    "shop__total-1": {
        "problem": "`total` in shop.py ignores how many of an item were bought: three pens for 2 each should cost 6.",
        "files": {
            "shop.py": '''def total(items):
    """What a list of (price, count) costs."""
    return sum(price for price, count in items)
''',
        },
        "tests": {"test_shop.py": "from shop import total\n\nassert total([(2, 3), (5, 1)]) == 11\nassert total([]) == 0\n"},
    },
    "names__initials-2": {
        "problem": "`initials` in names.py gives small letters where the name has them: for `ada lovelace` it should give `AL`.",
        "files": {
            "names.py": '''def initials(name):
    """The first letters of the parts of a name."""
    return "".join(part[0] for part in name.split())
''',
        },
        "tests": {
            "test_names.py": 'from names import initials\n\nassert initials("ada lovelace") == "AL"\nassert initials("X y Z") == "XYZ"\n'
        },
    },
}


def tasks() -> list[dict[str, str]]:
    return [{"instance": name} for name in INSTANCES]
